// Rows in flight through shared memory, for calls with more tokens than find room at once: memory that is never idle.
#pragma once

#include "local_sum.cuh"

namespace moe_tail {

// Adds kCount weighted vectors of shared memory, `stride` bytes apart from `row` on. All are requested before the first is used.
template <typename T, bool kWide, int kCount>
__device__ __forceinline__ void add_rows(uint32_t row, uint32_t stride, float weight, int lane, float (&acc)[8]) {
  uint4 read[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) read[i] = load_staged(row + i * stride);
#pragma unroll
  for (int i = 0; i < kCount; ++i) add_weighted<T, kWide>(read[i], __shfl_sync(~0u, weight, lane + i), acc);
}

// The same for a count below 2 * kMost that only the run knows.
template <typename T, bool kWide, int kMost>
__device__ __forceinline__ void add_some(uint32_t row, uint32_t stride, int count, float weight, int lane,
                                         float (&acc)[8]) {
  if (count & kMost) {
    add_rows<T, kWide, kMost>(row, stride, weight, lane, acc);
    row += kMost * stride;
    lane += kMost;
  }
  if constexpr (kMost > 1) add_some<T, kWide, kMost / 2>(row, stride, count, weight, lane, acc);
}

// Four rows at a step. The next step's rows travel while this one's are added up, across the boundary of tokens too, so
// that memory is busy while a token is reduced, normed and stored. A thread reads only what it asked for itself, so no
// barrier is needed.
template <typename T, bool kResidual>
struct RowPipe {
  static constexpr int kRows = 4, kStages = 2;
  static constexpr int kSlots = kRows + 1 + (kResidual ? 1 : 0);  // rows, shared output, residual
  static constexpr int kVectors = kStages * kSlots;               // of shared memory, a thread

  const Params& p;
  uint32_t column;  // in shared memory: this thread's, in [kVectors][threads]
  int first_vec;
  uint32_t step;  // between this block's tokens
  // The step that is asked for next: vector v of `token`, rows from slot k on.
  uint32_t token;
  int v = 0, k = 0;
  int stage = 0;  // holds the step that is used next

  __device__ __forceinline__ uint32_t stride() const { return blockDim.x * static_cast<uint32_t>(sizeof(uint4)); }
  __device__ __forceinline__ uint32_t at(int in_stage, int slot) const {
    return column + (in_stage * kSlots + slot) * stride();
  }

  // `rows` are those of `token`, as Routes has them.
  __device__ __forceinline__ void ask(int32_t rows, int in_stage) {
    if (token < p.tokens) {
      const int vec = first_vec + v * static_cast<int>(blockDim.x);
      const bool active = vec < p.vecs;
      const uint4* from = static_cast<const uint4*>(p.rows) + vec;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int32_t row = __shfl_sync(~0u, rows, k + i);
        if (row >= 0 && active) copy_async(at(in_stage, i), vector_at(from, row, p.row_bytes, 0));
      }
      if (k == 0 && active) {
        const uint32_t own = p.token_base + token;
        if (p.shared != nullptr) copy_async(at(in_stage, kRows), vector_at(p.shared, own, p.row_bytes, vec));
        if constexpr (kResidual) copy_async(at(in_stage, kRows + 1), vector_at(p.residual, own, p.row_bytes, vec));
      }
    }
    commit_copies();
    k += kRows;
    if (k < present(rows)) return;
    k = 0;
    if (++v < p.vecs_per_thread) return;
    v = 0;
    token += step;
  }

  // The published vector of the next step; `residual` if it is piped. `routes`, `next`: of the current token and of
  // the one after it.
  __device__ __forceinline__ uint4 sum(uint32_t current, const Routes& routes, const Routes& next, bool active,
                                       uint4& residual) {
    float acc[8];
    start(p, acc);
    uint4 shared = make_uint4(0, 0, 0, 0);
    const int count = present(routes.row);
    int first = 0;
    do {  // a token without a row takes one step, for its shared output
      ask(token == current ? routes.row : next.row, stage ^ 1);
      wait_for_all_copies_but<kStages - 1>();
      if (first == 0 && active) {
        if (p.shared != nullptr) shared = load_staged(at(stage, kRows));
        if constexpr (kResidual) residual = load_staged(at(stage, kRows + 1));
      }
      // Past the row's end: part of what is never stored.
      const int some = min(kRows, count - first);
      if (p.weights_fp32) {
        add_some<T, true, kRows>(at(stage, 0), stride(), some, routes.weight, first, acc);
      } else {
        add_some<T, false, kRows>(at(stage, 0), stride(), some, routes.weight, first, acc);
      }
      stage ^= 1;
      first += kRows;
    } while (first < count);
    return publish<T>(p, acc, shared);
  }
};

}  // namespace moe_tail
