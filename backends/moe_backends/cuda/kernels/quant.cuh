// The quantised outputs, element for element as moe_contract/quant.py defines them.
#pragma once

#include "params.h"
#include "sync.cuh"
#include "vec.cuh"

namespace moe_tail {

constexpr float kFp8Max = 448.0f;                              // e4m3fn
constexpr float kFp4Max = 6.0f;                                // e2m1
constexpr float kTokenMinScale = 1.0f / (kFp8Max * 512.0f);    // FP8_TOKEN_MIN_SCALE
constexpr int kTileRows = 128, kTileLanes = 32, kTileCols = 4;  // block-scale tile of the tensor cores

__device__ __forceinline__ float clamp_nan(float v, float lo, float hi) {  // NaN stays, as in torch.clamp
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(v), "f"(lo));
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(c), "f"(hi));
  return c;
}

__device__ __forceinline__ uint32_t e4m3_pair(float lo, float hi) {
  uint16_t w;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(w) : "f"(hi), "f"(lo));
  return w;
}

__device__ __forceinline__ float e4m3_value(uint32_t code) {
  uint32_t halves;
  const uint16_t pair = static_cast<uint16_t>(code);
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return __half22float2(*reinterpret_cast<__half2*>(&halves)).x;
}

__device__ __forceinline__ uint2 e4m3_vector(const float (&f)[8]) {
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    w[i] = e4m3_pair(clamp_nan(f[2 * i], -kFp8Max, kFp8Max), clamp_nan(f[2 * i + 1], -kFp8Max, kFp8Max));
  return {w[0] | w[1] << 16, w[2] | w[3] << 16};
}

// Nearest even, saturating; the sign of zero is kept; NaN gives +6, as the sm_100 instruction does.
__device__ __forceinline__ uint32_t e2m1_code(float v) {
  const float m = fabsf(v);
  uint32_t code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) + (m >= 3.5f) + (m > 5.0f);
  code |= __float_as_uint(v) >> 31 << 3;
  return v != v ? 7u : code;
}

__device__ __forceinline__ int64_t swizzled_at(int64_t row, int block, int padded_columns) {
  const int64_t tile = row / kTileRows * (padded_columns / kTileCols) + block / kTileCols;
  return tile * 512 + row % kTileLanes * 16 + row % kTileRows / kTileLanes * 4 + block % kTileCols;
}

__device__ __forceinline__ int padded_blocks(const Params& p) {
  return (p.vecs / 2 + kTileCols - 1) / kTileCols * kTileCols;
}

__device__ __forceinline__ void store_fp8(const Params& p, int64_t row, int vec, const float (&f)[8]) {
  static_cast<uint2*>(p.quant_out)[row * p.vecs + vec] = e4m3_vector(f);
}

// A block of 16 elements is two neighbouring vectors, so two neighbouring lanes; H is a multiple of 16 here.
__device__ __forceinline__ void store_nvfp4(const Params& p, int64_t row, int vec, bool active, const float (&f)[8]) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = Max::apply(amax, fabsf(f[i]));
  amax = Max::apply(amax, __shfl_xor_sync(~0u, amax, 1));
  const float wanted = clamp_nan(__fmul_rn(p.quant_arg, __fdiv_rn(amax, kFp4Max)), 0.0f, kFp8Max);
  const uint32_t scale = e4m3_pair(wanted, 0.0f) & 0xFFu;
  const float block_scale = e4m3_value(scale);
  const float factor = __fdiv_rn(p.quant_arg, block_scale);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) codes |= e2m1_code(__fmul_rn(f[i], factor)) << (4 * i);
  if (block_scale == 0.0f) codes = 0;
  if (!active) return;
  static_cast<uint32_t*>(p.quant_out)[row * p.vecs + vec] = codes;
  if (vec % 2 != 0) return;
  const int block = vec / 2, blocks = p.vecs / 2;
  const int64_t at = p.quant == kNvfp4Swizzled ? swizzled_at(row, block, padded_blocks(p)) : row * blocks + block;
  static_cast<uint8_t*>(p.quant_scale)[at] = static_cast<uint8_t>(scale);
}

// Swizzled scales only: zero the columns past H / 16 of one row, or, for a row past the tokens, all of it.
__device__ __forceinline__ void zero_scales(const Params& p, int64_t row, int first_block) {
  const int columns = padded_blocks(p);
  for (int block = first_block + threadIdx.x; block < columns; block += blockDim.x)
    static_cast<uint8_t*>(p.quant_scale)[swizzled_at(row, block, columns)] = 0;
}

}  // namespace moe_tail
