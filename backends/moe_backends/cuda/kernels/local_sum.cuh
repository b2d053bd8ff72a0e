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
  if (p.map != nullptr && lane < p.top_k && token < p.tokens) {
    const int64_t at = (p.token_base + token) * p.top_k + lane;
    r.row = p.map[at];
    r.weight = p.weights_fp32 ? static_cast<const float*>(p.weights)[at] : scalar<T>(p.weights, at);
  }
  return r;
}

// Vector `vec` of row `token` of the call. Products and sums are rounded one by one (no fused multiply-add), so that float32 weights
// give the bits of the plain PyTorch reference too. `shared` was loaded before, if there is one.
template <typename T>
__device__ __forceinline__ uint4 local_sum(const Params& p, const Routes& routes, int64_t token, int vec, bool active,
                                           uint4 shared) {
  const uint4* rows = static_cast<const uint4*>(p.rows);
  float acc[8];
  if (p.map == nullptr) {
    uint4 v = make_uint4(0, 0, 0, 0);
    if (active) v = load_once(rows + token * p.vecs + vec);
    unpack<T>(v, acc);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i] = 0.0f;
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
        if (present[k]) {  // a branch, not a factor of 0: a NaN weight of an absent slot must vanish
          float f[8];
          unpack<T>(got[k], f);
#pragma unroll
          for (int i = 0; i < 8; ++i) acc[i] = __fadd_rn(acc[i], __fmul_rn(f[i], weight));
        }
      }
    }
  }
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
