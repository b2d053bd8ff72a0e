// The fused tail: finalize, shared output, all-reduce over ranks, residual, RMSNorm, quantise. One kernel, one pass.
//
// A block (C = 1) or a cluster of C blocks takes whole tokens, `gridDim / C` apart. A thread keeps V 16-byte vectors
// of its token in registers from the first load to the last store. With ranks, a token's contribution is pushed before
// the previous token's is waited for, so that the trip to the peers hides behind the next token's loads.
#pragma once

#include "exchange.cuh"
#include "local_sum.cuh"
#include "quant.cuh"

namespace moe_tail {

template <int V>
struct Local {  // a token's contribution, pushed but not reduced yet
  uint4 own[V];
  uint4 residual[V];
  uint32_t epoch;
};

struct Lanes {  // which vectors of a token this thread owns
  int first, step, vecs;
  __device__ __forceinline__ int vec(int v) const { return first + v * step; }
  __device__ __forceinline__ bool active(int v) const { return vec(v) < vecs; }
};

template <typename T, int N, int V, int C, bool kTwoShot, bool kQuant>
struct Tail {
  static constexpr bool kEager = V == 1;  // few registers in use: ask for residual and gain before they are needed
  static constexpr int kSources = N < 8 ? N : 8;  // peers' vectors requested before the first is waited for

  const Params& p;
  const Lanes lanes;
  TokenReduce<C>& reduce;

  __device__ __forceinline__ uint4 load(const void* base, int64_t row, int v) const {
    return static_cast<const uint4*>(base)[row * p.vecs + lanes.vec(v)];
  }

  // Local sum of a token and its push. `routes` are this token's.
  __device__ __forceinline__ void contribute(int64_t token, const Routes& routes, Local<V>& out) {
    const int64_t row = p.token_base + token;
    if constexpr (N > 1) out.epoch = p.epochs[token];
    if constexpr (kEager) {
      if (lanes.active(0)) out.residual[0] = load(p.residual, row, 0);
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      uint4 shared = make_uint4(0, 0, 0, 0);
      if (p.shared != nullptr && lanes.active(v)) shared = load(p.shared, row, v);
      out.own[v] = local_sum<T>(p, routes, row, lanes.vec(v), lanes.active(v), shared);
      if constexpr (N > 1) {
        if (v == 0) test_stall(p, 0);
        if (lanes.active(v)) push(token, out, v);
      }
    }
    if constexpr (N > 1) test_stall(p, 1);
  }

  __device__ __forceinline__ void push(int64_t token, const Local<V>& mine, int v) {
    const int owner = static_cast<int>(token % N);
    if constexpr (kTwoShot) {
      if (owner != p.rank) store_shared(slot<N>(p, owner, p.rank, mine.epoch, token, lanes.vec(v)), mine.own[v]);
    } else {
      broadcast(token, mine.epoch, v, mine.own[v]);
    }
  }

  __device__ __forceinline__ void broadcast(int64_t token, uint32_t epoch, int v, uint4 value) {
#pragma unroll
    for (int peer = 0; peer < N; ++peer)
      if (peer != p.rank) store_shared(slot<N>(p, peer, p.rank, epoch, token, lanes.vec(v)), value);
  }

  // The published contributions of all ranks, added in float32 in rank order.
  __device__ __forceinline__ void sum_ranks(int64_t token, const Local<V>& mine, int v, float (&total)[8]) {
    if constexpr (N == 1) {
      unpack<T>(mine.own[v], total);
    } else {
      const int vec = lanes.vec(v);
#pragma unroll
      for (int first = 0; first < N; first += kSources) {
        uint4 got[kSources];
#pragma unroll
        for (int i = 0; i < kSources; ++i) {
          const int r = first + i;
          got[i] = r == p.rank ? mine.own[v] : load_shared(slot<N>(p, p.rank, r, mine.epoch, token, vec));
        }
#pragma unroll
        for (int i = 0; i < kSources; ++i) {
          const int r = first + i;
          if (r != p.rank)
            got[i] = await<N>(p, slot<N>(p, p.rank, r, mine.epoch, token, vec), got[i], r, mine.epoch, token);
          float f[8];
          unpack<T>(got[i], f);
#pragma unroll
          for (int j = 0; j < 8; ++j) total[j] = r == 0 ? f[j] : __fadd_rn(total[j], f[j]);
        }
      }
    }
  }

  __device__ __forceinline__ uint4 reduced(int64_t token, const Local<V>& mine, int v) {
    float total[8], f[8];
    const uint4 residual = kEager ? mine.residual[v] : load(p.residual, p.token_base + token, v);
    sum_ranks(token, mine, v, total);
    unpack<T>(residual, f);
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] = __fadd_rn(total[j], f[j]);
    return pack<T>(total);
  }

  // The rounded residual. Two-shot: the token's owner reduces and sends it; the same bits, since every rank has the
  // same residual and the owner adds in the same order.
  __device__ __forceinline__ uint4 exchange(int64_t token, const Local<V>& mine, int v) {
    if constexpr (kTwoShot) {
      const int owner = static_cast<int>(token % N);
      if (owner != p.rank) {
        uint4* at = slot<N>(p, p.rank, owner, mine.epoch, token, lanes.vec(v));
        return await<N>(p, at, load_shared(at), owner, mine.epoch, token);
      }
      const uint4 x = reduced(token, mine, v);
      broadcast(token, mine.epoch, v, x);
      return x;
    } else {
      return reduced(token, mine, v);
    }
  }

  __device__ __forceinline__ void gains(int v, float (&gain)[8]) const {
    const int vec = lanes.vec(v);
    if (p.gamma_fp32) {
      const float4* at = static_cast<const float4*>(p.gamma) + 2 * vec;
      const float4 lo = __ldg(at), hi = __ldg(at + 1);
      const float f[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) gain[i] = f[i] + p.weight_bias;
    } else {
      unpack<T>(__ldg(static_cast<const uint4*>(p.gamma) + vec), gain);
#pragma unroll
      for (int i = 0; i < 8; ++i) gain[i] += p.weight_bias;
    }
  }

  // Waits for the ranks, then residual, norm and quantised outputs of a token. `early` is the gain if kEager.
  __device__ __forceinline__ void finish(int64_t token, const Local<V>& mine, bool last, const float (&early)[8]) {
    const int64_t row = p.token_base + token;
    uint4 x[V];
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < V; ++v) {
      x[v] = make_uint4(0, 0, 0, 0);
      if (!lanes.active(v)) continue;
      x[v] = exchange(token, mine, v);
      if (p.residual_out != nullptr) static_cast<uint4*>(p.residual_out)[row * p.vecs + lanes.vec(v)] = x[v];
      float f[8];
      unpack<T>(x[v], f);
#pragma unroll
      for (int j = 0; j < 8; ++j) squares += f[j] * f[j];
    }
    if constexpr (N > 1) test_stall(p, 2);
    squares = reduce.template operator()<Sum>(squares);
    // Past the barrier every thread of the token has read its epoch and ended its waits.
    if (N > 1 && threadIdx.x == 0 && reduce.cta == 0) p.epochs[token] = mine.epoch + 1;
    if (last) release_stream();
    const float root = 1.0f / sqrtf(squares / static_cast<float>(p.vecs * kVecElems) + p.eps);
#pragma unroll
    for (int v = 0; v < V; ++v) {
      if (!lanes.active(v)) continue;
      float f[8], gain[8];
      unpack<T>(x[v], f);
      if constexpr (kEager) {
#pragma unroll
        for (int j = 0; j < 8; ++j) gain[j] = early[j];
      } else {
        gains(v, gain);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) f[j] = f[j] * root * gain[j];
      x[v] = pack<T>(f);
      if (p.norm_out != nullptr) static_cast<uint4*>(p.norm_out)[row * p.vecs + lanes.vec(v)] = x[v];
    }
    if constexpr (kQuant) quantise(row, x);
  }

  __device__ __forceinline__ void quantise(int64_t row, const uint4 (&norm)[V]) {
    float factor = p.quant_arg;
    if (p.quant == kFp8Static) {
      factor = __fdiv_rn(1.0f, p.quant_arg);
      if (row == 0 && threadIdx.x == 0 && reduce.cta == 0) *static_cast<float*>(p.quant_scale) = p.quant_arg;
    } else if (p.quant == kFp8Token) {
      float amax = 0.0f;
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float f[8];
        unpack<T>(norm[v], f);  // zeros where the vector is past the row
#pragma unroll
        for (int j = 0; j < 8; ++j) amax = Max::apply(amax, fabsf(f[j]));
      }
      amax = reduce.template operator()<Max>(amax);
      factor = Max::apply(__fdiv_rn(amax, kFp8Max), kTokenMinScale);
      if (threadIdx.x == 0 && reduce.cta == 0) static_cast<float*>(p.quant_scale)[row] = factor;
    }
#pragma unroll
    for (int v = 0; v < V; ++v) {
      float f[8];
      unpack<T>(norm[v], f);
      if (p.quant >= kNvfp4Linear) {
        store_nvfp4(p, row, lanes.vec(v), lanes.active(v), f);
      } else if (lanes.active(v)) {
#pragma unroll
        for (int j = 0; j < 8; ++j) f[j] = p.quant == kFp8Static ? __fmul_rn(f[j], factor) : __fdiv_rn(f[j], factor);
        store_fp8(p, row, lanes.vec(v), f);
      }
    }
    if (p.quant == kNvfp4Swizzled && reduce.cta == 0) zero_scales(p, row, p.vecs / 2);
  }
};

template <typename T, int N, int V, int C, bool kTwoShot, bool kQuant, int kRegs>
__global__ void __maxnreg__(kRegs) tail_kernel(const __grid_constant__ Params p) {
  __shared__ float scratch[2 * C * kMaxWarps];
  const uint32_t cta = C > 1 ? cluster_rank() : 0u;
  if constexpr (C > 1) cluster_arrive();  // no block may write into another's memory before that one has started
  TokenReduce<C> reduce{scratch, cta};
  const int threads = blockDim.x;
  Tail<T, N, V, C, kTwoShot, kQuant> tail{
      p, {static_cast<int>(cta) * threads + static_cast<int>(threadIdx.x), C * threads, p.vecs}, reduce};
  const int64_t step = gridDim.x / C;
  int64_t token = blockIdx.x / C;  // the launcher starts no block without a token

  wait_for_stream();
  Routes routes = load_routes<T>(p, token);
  float gain[8] = {};
  if constexpr (V == 1) {
    if (tail.lanes.active(0)) tail.gains(0, gain);
  }
  Local<V> mine;
  tail.contribute(token, routes, mine);
  routes = load_routes<T>(p, token + step);
  if constexpr (C > 1) cluster_wait();
  for (;;) {
    const int64_t next = token + step;
    const bool last = next >= p.tokens;
    if constexpr (N > 1) {
      Local<V> ahead;
      if (!last) {
        tail.contribute(next, routes, ahead);
        routes = load_routes<T>(p, next + step);
      }
      tail.finish(token, mine, last, gain);
      mine = ahead;
    } else {
      tail.finish(token, mine, last, gain);
      if (!last) {
        tail.contribute(next, routes, mine);
        routes = load_routes<T>(p, next + step);
      }
    }
    if (last) break;
    token = next;
  }
  if constexpr (kQuant) {
    if (p.quant == kNvfp4Swizzled && cta == 0 && p.token_base + p.tokens == p.call_tokens) {
      const int64_t end = (p.call_tokens + kTileRows - 1) / kTileRows * kTileRows;
      for (int64_t row = p.call_tokens + blockIdx.x / C; row < end; row += step) zero_scales(p, row, 0);
    }
  }
}

}  // namespace moe_tail
