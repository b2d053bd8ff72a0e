// The all-reduce of one vector: to the peers, from the peers, sum in rank order, residual.
#pragma once

#include "columns.cuh"
#include "exchange.cuh"

namespace moe_tail {

// The residual added to a sum in float32, rounded once.
template <typename T>
__device__ __forceinline__ uint4 with_residual(float (&total)[8], uint4 residual) {
  float f[8];
  unpack<T>(residual, f);
#pragma unroll
  for (int j = 0; j < 8; ++j) total[j] = __fadd_rn(total[j], f[j]);
  return pack<T>(total);
}

// At most kMost peers' vectors are requested before the first is waited for.
template <typename T, int N, bool kTwoShot, int kMost>
struct Peers {
  static constexpr int kSources = N > kMost ? 4 : N;  // a divisor of N

  // What a thread asks for before it waits: the residual and the first peers' vectors, or the owner's (two-shot).
  struct Incoming {
    uint4 residual;
    uint4 got[kSources];
  };

  const Params& p;

  __device__ __forceinline__ bool owns(uint32_t token) const {
    return !kTwoShot || token % N == static_cast<uint32_t>(p.rank);
  }

  // This rank's contribution to the ranks that need it.
  __device__ __forceinline__ void push(uint32_t token, uint32_t epoch, int at, uint4 own) const {
    if constexpr (kTwoShot) {
      const int owner = static_cast<int>(token % N);
      if (owner != p.rank) store_shared(slot(p, owner, p.rank, slot_offset(p, epoch, token, at)), own);
    } else {
      broadcast(token, epoch, at, own);
    }
  }

  __device__ __forceinline__ void broadcast(uint32_t token, uint32_t epoch, int at, uint4 value) const {
    const uint64_t offset = slot_offset(p, epoch, token, at);
#pragma unroll
    for (int peer = 0; peer < N; ++peer)
      if (peer != p.rank) store_shared(slot(p, peer, p.rank, offset), value);
  }

  __device__ __forceinline__ Incoming ask(uint32_t token, uint32_t epoch, int at, uint4 residual) const {
    Incoming in = {};
    in.residual = residual;
    if (at >= p.vecs) return in;
    const uint64_t offset = slot_offset(p, epoch, token, at);
    if (!owns(token)) {
      in.got[0] = load_shared(slot(p, p.rank, static_cast<int>(token % N), offset));
    } else {
      ask_sources(offset, 0, in);
    }
    return in;
  }

  // The same, and the residual too.
  __device__ __forceinline__ Incoming ask(uint32_t token, uint32_t epoch, int at) const {
    const bool needed = at < p.vecs && owns(token);
    const uint4 none = make_uint4(0, 0, 0, 0);
    return ask(token, epoch, at, needed ? load_once(vector_at(p.residual, p.token_base + token, p.row_bytes, at)) : none);
  }

  __device__ __forceinline__ void ask_sources(uint64_t offset, int base, Incoming& in) const {
#pragma unroll
    for (int i = 0; i < kSources; ++i)
      if (base + i != p.rank) in.got[i] = load_shared(slot(p, p.rank, base + i, offset));
  }

  // The rounded residual: the published contributions of all ranks, added in float32 in rank order, and the residual.
  // Two-shot: the token's owner reduces and sends it; the same bits, since every rank has the same residual and the
  // owner adds in the same order.
  __device__ __forceinline__ uint4 receive(uint32_t token, uint32_t epoch, int at, uint4 own, Incoming& in) const {
    const uint64_t offset = slot_offset(p, epoch, token, at);
    if (!owns(token)) {
      const int owner = static_cast<int>(token % N);
      return await(p, slot(p, p.rank, owner, offset), in.got[0], owner, epoch, token);
    }
    float total[8];
#pragma unroll
    for (int base = 0; base < N; base += kSources) {
      if (base > 0) ask_sources(offset, base, in);
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        const int r = base + i;
        uint4 value = own;
        if (r != p.rank) value = await(p, slot(p, p.rank, r, offset), in.got[i], r, epoch, token);
        float f[8];
        unpack<T>(value, f);
#pragma unroll
        for (int j = 0; j < 8; ++j) total[j] = r == 0 ? f[j] : __fadd_rn(total[j], f[j]);
      }
    }
    const uint4 x = with_residual<T>(total, in.residual);
    if constexpr (kTwoShot) broadcast(token, epoch, at, x);
    return x;
  }
};

}  // namespace moe_tail
