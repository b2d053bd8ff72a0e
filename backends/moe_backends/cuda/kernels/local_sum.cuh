// One rank's contribution to one token: scale * sum over slots of weight * row, plus the shared output, in float32.
#pragma once

#include "params.h"
#include "vec.cuh"

namespace moe_tail {

// The present slots of one token in slot order, one per lane: lanes from count() on hold none.
struct Routes {
  int32_t row;  // negative: none
  float weight;
  // The same in every lane. Counted again each time: registers are dearer than two instructions.
  __device__ __forceinline__ int count() const { return __popc(__ballot_sync(~0u, row >= 0)); }
};

// Closes the gaps that absent slots left, so that no later step meets one. An expert-parallel rank has many.
__device__ __forceinline__ Routes without_gaps(Routes r) {
  const unsigned present = __ballot_sync(~0u, r.row >= 0);
  if (present & (present + 1)) {  // not all in the first lanes
    const unsigned source = __fns(present, 0, static_cast<int>(threadIdx.x & 31) + 1);  // beyond the last: ~0
    const int32_t row = __shfl_sync(~0u, r.row, source & 31);
    r.weight = __shfl_sync(~0u, r.weight, source & 31);
    r.row = source < 32 ? row : -1;
  }
  return r;
}

// A single coalesced load each for the indices and the weights.
template <typename T>
__device__ __forceinline__ Routes load_routes(const Params& p, int64_t token) {  // of this launch
  Routes r{-1, 0.0f};
  if (token >= p.tokens) return r;
  const int lane = threadIdx.x & 31;
  if (p.map == nullptr) return {lane == 0 ? static_cast<int32_t>(p.token_base + token) : -1, 1.0f};
  if (lane < p.top_k) {
    const int64_t at = (p.token_base + token) * p.top_k + lane;
    r.row = p.map[at];
    r.weight = p.weights_fp32 ? static_cast<const float*>(p.weights)[at] : scalar<T>(p.weights, at);
  }
  return without_gaps(r);
}

// A sum starts at +0. A finalized row is taken as it is, the sign of its zeros included, hence -0.
__device__ __forceinline__ void start(const Params& p, float (&acc)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i] = p.map == nullptr ? -0.0f : 0.0f;
}

// Adds kCount weighted vectors, one in each `stride` vectors from `row` on. All are requested before the first is used.
// The product of two 16-bit values is exact in float32 (from 2^-134 on), so one rounding after a fused multiply-add
// gives the bits of a product and a sum; with a float32 weight (kWide) each is rounded by itself, as the plain PyTorch
// reference does.
template <typename T, bool kWide, int kCount>
__device__ __forceinline__ void add_rows(const uint4* row, int stride, float weight, int lane, float (&acc)[8]) {
  uint4 read[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) read[i] = row[i * stride];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float w = __shfl_sync(~0u, weight, lane + i);
    float f[8];
    unpack<T>(read[i], f);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      acc[j] = kWide ? __fadd_rn(acc[j], __fmul_rn(f[j], w)) : __fmaf_rn(f[j], w, acc[j]);
  }
}

// The same for a count below 2 * kMost that only the run knows, at most kTogether at once.
template <typename T, bool kWide, int kMost, int kTogether>
__device__ __forceinline__ void add_some(const uint4* row, int stride, int count, float weight, int lane,
                                         float (&acc)[8]) {
  if (count & kMost) {
    constexpr int kBatch = kMost < kTogether ? kMost : kTogether;
#pragma unroll 1
    for (int done = 0; done < kMost; done += kBatch) {
      add_rows<T, kWide, kBatch>(row, stride, weight, lane, acc);
      row += kBatch * stride;
      lane += kBatch;
    }
  }
  if constexpr (kMost > 1) add_some<T, kWide, kMost / 2, kTogether>(row, stride, count, weight, lane, acc);
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

// The rows of a token on their way through shared memory, kRows at a step. With two stages the next step's rows travel
// while this one's are added up, across the boundary of tokens too, so that memory is busy while a token is reduced,
// normed and stored. A thread reads only what it asked for itself, so no barrier is needed.
// kTogether rows are read from shared memory at once.
template <typename T, bool kResidual, int kRows, int kStages, int kTogether>
struct RowPipe {
  static constexpr int kSlots = kRows + 1 + (kResidual ? 1 : 0);  // rows, shared output, residual
  static constexpr int kVectors = kStages * kSlots;               // of shared memory, a thread

  const Params& p;
  uint4* column;  // this thread's, in [kVectors][threads]
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
    if (token < p.tokens) {
      const int vec = first_vec + v * static_cast<int>(blockDim.x);
      const bool active = vec < p.vecs;
      const uint4* from = static_cast<const uint4*>(p.rows) + vec;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int32_t row = __shfl_sync(~0u, routes.row, k + i);
        if (row >= 0 && active) copy_async(at(in_stage, i), from + static_cast<int64_t>(row) * p.vecs);
      }
      if (k == 0 && active) {
        const int64_t offset = (p.token_base + token) * p.vecs + vec;
        if (p.shared != nullptr) copy_async(at(in_stage, kRows), static_cast<const uint4*>(p.shared) + offset);
        if constexpr (kResidual)
          copy_async(at(in_stage, kRows + 1), static_cast<const uint4*>(p.residual) + offset);
      }
    }
    commit_copies();
    k += kRows;
    if (k < routes.count()) return;
    k = 0;
    if (++v < p.vecs_per_thread) return;
    v = 0;
    token += step;
  }

  // The published vector of the next step; `residual` if it is piped. `routes`, `next`: of the current token and of
  // the one after it.
  __device__ __forceinline__ uint4 sum(int64_t current, const Routes& routes, const Routes& next, bool active,
                                       uint4& residual) {
    float acc[8];
    start(p, acc);
    uint4 shared = make_uint4(0, 0, 0, 0);
    const int present = routes.count();
    int first = 0;
    do {  // a token without a row takes one step, for its shared output
      if constexpr (kStages > 1) ask_next(current, routes, next, stage ^ 1);
      wait_for_all_copies_but<kStages - 1>();
      if (first == 0 && active) {
        if (p.shared != nullptr) shared = *at(stage, kRows);
        if constexpr (kResidual) residual = *at(stage, kRows + 1);
      }
      // Past the row's end: part of what is never stored.
      const int count = min(kRows, present - first);
      if (p.weights_fp32) {
        add_some<T, true, kRows, kTogether>(at(stage, 0), blockDim.x, count, routes.weight, first, acc);
      } else {
        add_some<T, false, kRows, kTogether>(at(stage, 0), blockDim.x, count, routes.weight, first, acc);
      }
      if constexpr (kStages == 1) {
        ask_next(current, routes, next, 0);
      } else {
        stage ^= 1;
      }
      first += kRows;
    } while (first < present);
    return publish<T>(p, acc, shared);
  }

  __device__ __forceinline__ void ask_next(int64_t current, const Routes& routes, const Routes& next, int in_stage) {
    const bool same = token == current;
    ask(Routes{same ? routes.row : next.row, 0.0f}, in_stage);
  }
};

}  // namespace moe_tail
