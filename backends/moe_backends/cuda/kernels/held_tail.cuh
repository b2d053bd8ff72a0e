// Few tokens: a block, or a cluster of two or four, holds one token in registers from its rows to its outputs. All that
// it reads is requested before the first use, since what such a call costs is its chain of dependent loads.
#pragma once

#include "held_rows.cuh"
#include "outputs.cuh"
#include "peers.cuh"

namespace moe_tail {

template <typename T, int N, int kCluster, bool kQuant>
struct HeldTail {
  using Form = Held<kCluster>;
  static constexpr int kVectors = Form::kVectors;

  const Params& p;
  Outputs<T, Form, kQuant>& out;
  using Exchange = Peers<T, N, false, 4>;  // more take registers that the rows need
  Exchange peers{p};
  const uint32_t token;  // of this launch
  const uint32_t row;    // of the call
  const uint32_t epoch;

  // The published contribution, given what does not depend on the routes.
  __device__ __forceinline__ void contribute(const Routes& routes, const uint4 (&shared)[kVectors],
                                             Column<Form>& own) const {
    const uint4* column[kVectors];
    float acc[kVectors][8];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      column[v] = vector_at(p.rows, 0, 0, inside(v));
      start(p, acc[v]);
    }
    if (p.weights_fp32) {
      sum_held_rows<T, true, kVectors>(p, routes, column, acc);
    } else {
      sum_held_rows<T, false, kVectors>(p, routes, column, acc);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) own.set(v, publish<T>(p, acc[v], shared[v]));
  }

  // Vectors past the row's end are read as its last one and never stored.
  __device__ __forceinline__ int inside(int v) const { return min(out.vec(v), p.vecs - 1); }

  // From contributions to rounded residuals; returns this thread's sum of squares of them.
  __device__ __forceinline__ float reduce_ranks(const uint4 (&residual)[kVectors], Column<Form>& own) const {
    typename Exchange::Incoming in[kVectors];
    if constexpr (N > 1) {
      test_stall(p, 0);
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if (out.vec(v) < p.vecs) peers.push(token, epoch, out.vec(v), own.get(v));
      test_stall(p, 1);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) in[v] = peers.ask(token, epoch, out.vec(v), residual[v]);
    }
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int at = out.vec(v);
      if (at >= p.vecs) break;
      if constexpr (N > 1) {
        own.set(v, peers.receive(token, epoch, at, own.get(v), in[v]));
      } else {
        float total[8];
        unpack<T>(own.get(v), total);
        own.set(v, with_residual<T>(total, residual[v]));
      }
      squares += out.keep(row, at, own.get(v));
    }
    if constexpr (N > 1) test_stall(p, 2);
    return squares;
  }
};

template <typename T, int N, int kCluster, bool kQuant>
__device__ __forceinline__ void run_held(const Params& p) {
  using Body = HeldTail<T, N, kCluster, kQuant>;
  using Reduce = TokenReduce<kCluster>;
  constexpr int kVectors = Body::kVectors;
  constexpr bool kEarlyGain = kCluster == kMaxCluster;  // else the rows need the registers
  __shared__ typename Reduce::Scratch scratch;
  const uint32_t cta = kCluster > 1 ? cluster_rank() : 0u, token = blockIdx.x / kCluster;
  Reduce reduce{scratch, cta};
  reduce.begin();
  Outputs<T, Held<kCluster>, kQuant> out{p, reduce, static_cast<int>(cta * blockDim.x + threadIdx.x)};

  wait_for_stream();
  const Routes routes = load_routes<T>(p, token);
  const uint32_t row = p.token_base + token;
  Body tail{p, out, {p}, token, row, N > 1 ? p.epochs[token] : 0u};
  uint4 shared[kVectors], residual[kVectors];
  Gain gain[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int at = tail.inside(v);
    shared[v] = p.shared == nullptr ? make_uint4(0, 0, 0, 0) : load_once(vector_at(p.shared, row, p.row_bytes, at));
    residual[v] = load_once(vector_at(p.residual, row, p.row_bytes, at));
    if constexpr (kEarlyGain) gain[v] = out.load_gain(at);
  }
  Column<Held<kCluster>> own;
  tail.contribute(routes, shared, own);
  if constexpr (!kEarlyGain) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) gain[v] = out.load_gain(tail.inside(v));
  }
  float squares = tail.reduce_ranks(residual, own);
  reduce.wait_for_blocks();
  squares = reduce.template operator()<Sum>(squares);
  // Past the reduction every thread of the token has read its epoch and ended its waits.
  if (N > 1 && threadIdx.x == 0 && cta == 0) p.epochs[token] = tail.epoch + 1;
  release_stream();
  const float root = out.root(squares);
#pragma unroll
  for (int v = 0; v < kVectors; ++v)
    if (out.vec(v) < p.vecs) out.normalise(row, v, root, gain[v], own);
  if constexpr (kQuant) {
    out.quantise(row, own);
    out.zero_tail_rows(token, gridDim.x / kCluster);
  }
}

}  // namespace moe_tail
