// One rank's contribution to one token: scale * sum over slots of weight * row, plus the shared output, in float32.
#pragma once

#include "params.h"
#include "vec.cuh"

namespace moe_tail {

constexpr int kInFlight = 8;  // rows whose vectors are requested before the first one is used

// The slots of one token, one per lane: a single coalesced load each for the indices and the weights.
struct Routes {
  int32_t row;  // negative: absent
  float weight;
};

template <typename T>
__device__ __forceinline__ Routes load_routes(const Params& p, int64_t token) {  // of this launch
  const int lane = threadIdx.x & 31;
  Routes r{-1, 0.0f};
  if (p.map == nullptr && lane == 0 && token < p.tokens) r = {static_cast<int32_t>(p.token_base + token), 1.0f};
  if (p.map != nullptr && lane < p.top_k && token < p.tokens) {
    const int64_t at = (p.token_base + token) * p.top_k + lane;
    r.row = p.map[at];
    r.weight = p.weights_fp32 ? static_cast<const float*>(p.weights)[at] : scalar<T>(p.weights, at);
  }
  return r;
}

// Adds one weighted vector. Products and sums are rounded one by one (no fused multiply-add), so that float32 weights
// give the bits of the plain PyTorch reference too. A finalized row is taken as it is, the sign of its zeros included.
template <typename T>
__device__ __forceinline__ void add_row(const Params& p, uint4 row, float weight, float (&acc)[8]) {
  float f[8];
  unpack<T>(row, f);
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] = p.map == nullptr ? f[i] : __fadd_rn(acc[i], __fmul_rn(f[i], weight));
}

// Scale, shared output, the one rounding to publish.
template <typename T>
__device__ __forceinline__ uint4 publish(const Params& p, float (&acc)[8], uint4 shared) {
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] = __fmul_rn(acc[i], p.scale);
  if (p.shared != nullptr) {
    float f[8];
    unpack<T>(shared, f);
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] = __fadd_rn(acc[i], f[i]);
  }
  return pack<T>(acc);
}

// Vector `vec` of a token in registers: kInFlight rows are asked for before the first is used.
template <typename T>
__device__ __forceinline__ uint4 local_sum(const Params& p, const Routes& routes, int vec, bool active, uint4 shared) {
  const uint4* rows = static_cast<const uint4*>(p.rows);
  float acc[8] = {};
  for (int first = 0; first < p.top_k; first += kInFlight) {
    uint4 got[kInFlight];
    bool present[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int32_t row = __shfl_sync(~0u, routes.row, first + k);  // lanes past top_k hold -1
      present[k] = row >= 0;
      if (present[k] && active) got[k] = load_once(rows + static_cast<int64_t>(row) * p.vecs + vec);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const float weight = __shfl_sync(~0u, routes.weight, first + k);
      if (present[k]) add_row<T>(p, got[k], weight, acc);  // a branch: a NaN weight of an absent slot must vanish
    }
  }
  return publish<T>(p, acc, shared);
}

// The same through shared memory: while one step is added up, the rows of the next are on their way, across the
// boundary of tokens too, so that memory is busy while a token is reduced, normed and stored. A thread reads only what
// it asked for itself, so no barrier is needed.
template <typename T, bool kResidual>
struct RowPipe {
  static constexpr int kSlots = kInFlight + 1 + (kResidual ? 1 : 0);  // rows, shared output, residual
  static constexpr int kStages = 2;

  const Params& p;
  uint4* column;  // this thread's, in [kStages][kSlots][threads]
  int first_vec;
  int64_t step;  // between this block's tokens
  // The step that is asked for next: vector v of `token`, rows from slot k on.
  int64_t token;
  int v = 0, k = 0;
  int stage = 0;  // holds the step that is used next

  __device__ __forceinline__ uint4* at(int in_stage, int slot) const {
    return column + (in_stage * kSlots + slot) * static_cast<int>(blockDim.x);
  }

  // `routes` are those of `token`.
  __device__ __forceinline__ void ask(const Routes& routes, int in_stage) {
    const int vec = first_vec + v * static_cast<int>(blockDim.x);
    const bool active = vec < p.vecs && token < p.tokens;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int32_t row = __shfl_sync(~0u, routes.row, k + i);
      if (row >= 0 && active)
        copy_async(at(in_stage, i), static_cast<const uint4*>(p.rows) + static_cast<int64_t>(row) * p.vecs + vec);
    }
    if (k == 0 && active) {
      const int64_t offset = (p.token_base + token) * p.vecs + vec;
      if (p.shared != nullptr) copy_async(at(in_stage, kInFlight), static_cast<const uint4*>(p.shared) + offset);
      if constexpr (kResidual)
        copy_async(at(in_stage, kInFlight + 1), static_cast<const uint4*>(p.residual) + offset);
    }
    commit_copies();
    k += kInFlight;
    if (k < p.top_k) return;
    k = 0;
    if (++v < p.vecs_per_thread) return;
    v = 0;
    token += step;
  }

  // The published vector of the next step; `residual` if it is piped. `routes`, `next`: of the current token and of
  // the one after it.
  __device__ __forceinline__ uint4 sum(int64_t current, const Routes& routes, const Routes& next, bool active,
                                       uint4& residual) {
    float acc[8] = {};
    uint4 shared = make_uint4(0, 0, 0, 0);
    for (int first = 0; first < p.top_k; first += kInFlight) {
      Routes wanted = routes;
      if (token != current) wanted = next;
      ask(wanted, stage ^ 1);
      wait_for_all_but_last_copies();
      if (first == 0 && active) {
        if (p.shared != nullptr) shared = *at(stage, kInFlight);
        if constexpr (kResidual) residual = *at(stage, kInFlight + 1);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int32_t row = __shfl_sync(~0u, routes.row, first + i);
        const float weight = __shfl_sync(~0u, routes.weight, first + i);
        if (row >= 0 && active) add_row<T>(p, *at(stage, i), weight, acc);
      }
      stage ^= 1;
    }
    return publish<T>(p, acc, shared);
  }
};

}  // namespace moe_tail
