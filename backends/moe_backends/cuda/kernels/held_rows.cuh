// The rows of a token that its threads hold: from memory into registers, all requested before the first is used. The
// shortest chain of instructions and of loads, for calls whose tokens find room at once.
#pragma once

#include "local_sum.cuh"

namespace moe_tail {

constexpr int kHeldRows = 8;  // of a vector, in registers together

// Adds `count` rows, from slot `slot` on, to kVectors columns. `column[v]` is vector v of row 0.
template <typename T, bool kWide, int kVectors, bool kAll>
__device__ __forceinline__ void add_held_rows(const Params& p, const Routes& routes, int slot, int count,
                                              const uint4* const (&column)[kVectors], float (&acc)[kVectors][8]) {
  uint4 read[kHeldRows][kVectors];
#pragma unroll
  for (int i = 0; i < kHeldRows; ++i) {
    if (kAll || i < count) {
      const uint32_t row = __shfl_sync(~0u, routes.row, slot + i);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) read[i][v] = load_once(vector_at(column[v], row, p.row_bytes, 0));
    }
  }
#pragma unroll
  for (int i = 0; i < kHeldRows; ++i) {
    if (kAll || i < count) {
      const float weight = __shfl_sync(~0u, routes.weight, slot + i);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) add_weighted<T, kWide>(read[i][v], weight, acc[v]);
    }
  }
}

template <typename T, bool kWide, int kVectors>
__device__ __forceinline__ void sum_held_rows(const Params& p, const Routes& routes,
                                              const uint4* const (&column)[kVectors], float (&acc)[kVectors][8]) {
  const int count = present(routes.row);
  int slot = 0;
#pragma unroll 1
  for (; slot + kHeldRows <= count; slot += kHeldRows)
    add_held_rows<T, kWide, kVectors, true>(p, routes, slot, kHeldRows, column, acc);
  if (slot < count) add_held_rows<T, kWide, kVectors, false>(p, routes, slot, count - slot, column, acc);
}

}  // namespace moe_tail
