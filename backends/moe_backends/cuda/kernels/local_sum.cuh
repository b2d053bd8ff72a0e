// One rank's contribution to one token: scale * sum over slots of weight * row, plus the shared output, in float32.
#pragma once

#include "params.h"
#include "vec.cuh"

namespace moe_tail {

// The present slots of one token in slot order, one per lane; the lanes after them hold none.
struct Routes {
  int32_t row;  // negative: none
  float weight;
};

// How many lanes have a row; the same in every lane. Counted again each time: registers are dearer than two instructions.
__device__ __forceinline__ int present(int32_t row) { return __popc(__ballot_sync(~0u, row >= 0)); }

// The place of the n-th set bit of `bits`, n from 0; meaningless where there is none.
__device__ __forceinline__ int nth_set(unsigned bits, int n) {
  int place = 0;
#pragma unroll
  for (int width = 16; width > 0; width /= 2) {
    const int below = __popc((bits >> place) & ((1u << width) - 1));
    if (n >= below) {
      n -= below;
      place += width;
    }
  }
  return place;
}

// Closes the gaps that absent slots left, so that no later step meets one. An expert-parallel rank has many.
__device__ __forceinline__ Routes without_gaps(Routes r) {
  const unsigned found = __ballot_sync(~0u, r.row >= 0);
  if (found & (found + 1)) {  // not all in the first lanes
    const int lane = static_cast<int>(threadIdx.x & 31), source = nth_set(found, lane);
    const int32_t row = __shfl_sync(~0u, r.row, source);
    r.weight = __shfl_sync(~0u, r.weight, source);
    r.row = lane < __popc(found) ? row : -1;
  }
  return r;
}

// A single coalesced load each for the indices and the weights.
template <typename T>
__device__ __forceinline__ Routes load_routes(const Params& p, uint32_t token) {  // of this launch
  Routes r{-1, 0.0f};
  if (token >= p.tokens) return r;
  const int lane = threadIdx.x & 31;
  if (p.map == nullptr) return {lane == 0 ? static_cast<int32_t>(p.token_base + token) : -1, 1.0f};
  if (lane < p.top_k) {
    const uint64_t at = static_cast<uint64_t>(p.token_base + token) * static_cast<uint32_t>(p.top_k) + lane;
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

// The product of two 16-bit values is exact in float32 (from 2^-134 on), so one rounding after a fused multiply-add
// gives the bits of a product and a sum; with a float32 weight (kWide) each is rounded by itself, as the plain PyTorch
// reference does.
template <typename T, bool kWide>
__device__ __forceinline__ void add_weighted(uint4 row, float weight, float (&acc)[8]) {
  float f[8];
  unpack<T>(row, f);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    acc[j] = kWide ? __fadd_rn(acc[j], __fmul_rn(f[j], weight)) : __fmaf_rn(f[j], weight, acc[j]);
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

}  // namespace moe_tail
