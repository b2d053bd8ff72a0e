// What a token leaves behind once its sum is known: rounded residual, norm, quantised norm.
#pragma once

#include "columns.cuh"
#include "quant.cuh"
#include "sync.cuh"
#include "vec.cuh"

namespace moe_tail {

// The norm's weights of one vector as they lie in memory: 16-bit in the first half alone, float32 in both.
struct Gain {
  uint4 raw[2];
};

template <typename T, typename Form, bool kQuant>
struct Outputs {
  const Params& p;
  TokenReduce<Form::kBlocks>& reduce;
  const int first;  // vectors first, first + threads, ... are this thread's

  __device__ __forceinline__ int trips() const { return Form::trips(p); }
  __device__ __forceinline__ int vec(int v) const { return first + v * static_cast<int>(blockDim.x); }

  // Stores a vector of the rounded residual; returns its sum of squares.
  __device__ __forceinline__ float keep(uint32_t row, int at, uint4 x) const {
    if (p.residual_out != nullptr) store(vector_at(p.residual_out, row, p.row_bytes, at), x);
    float f[8], squares = 0.0f;
    unpack<T>(x, f);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += f[j] * f[j];
    return squares;
  }

  __device__ __forceinline__ Gain load_gain(int at) const {
    Gain gain = {};
    const uint4* from = static_cast<const uint4*>(p.gamma);
    if (p.gamma_fp32) {
      gain.raw[0] = __ldg(from + 2 * at);
      gain.raw[1] = __ldg(from + 2 * at + 1);
    } else {
      gain.raw[0] = __ldg(from + at);
    }
    return gain;
  }

  __device__ __forceinline__ void values_of(const Gain& gain, float (&f)[8]) const {
    if (p.gamma_fp32) {
      const uint32_t w[8] = {gain.raw[0].x, gain.raw[0].y, gain.raw[0].z, gain.raw[0].w,
                             gain.raw[1].x, gain.raw[1].y, gain.raw[1].z, gain.raw[1].w};
#pragma unroll
      for (int i = 0; i < 8; ++i) f[i] = __uint_as_float(w[i]);
    } else {
      unpack<T>(gain.raw[0], f);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] += p.weight_bias;
  }

  __device__ __forceinline__ float root(float squares) const {
    return inverse_root(squares * p.inverse_hidden + p.eps);
  }

  // One vector of the norm; `norm` becomes it if it is quantised later.
  __device__ __forceinline__ void normalise(uint32_t row, int v, float root, const Gain& gain,
                                            Column<Form>& norm) const {
    float f[8], weight[8];
    unpack<T>(norm.get(v), f);
    values_of(gain, weight);
#pragma unroll
    for (int j = 0; j < 8; ++j) f[j] = f[j] * root * weight[j];
    const uint4 x = pack<T>(f);
    if constexpr (kQuant) norm.set(v, x);
    if (p.norm_out != nullptr) store(vector_at(p.norm_out, row, p.row_bytes, vec(v)), x);
  }

  __device__ __forceinline__ float token_factor(uint32_t row, const Column<Form>& norm) {
    float amax = 0.0f;
#pragma unroll Form::kUnroll
    for (int v = 0; v < trips(); ++v) {
      if (vec(v) >= p.vecs) break;
      float f[8];
      unpack<T>(norm.get(v), f);
#pragma unroll
      for (int j = 0; j < 8; ++j) amax = Max::apply(amax, fabsf(f[j]));
    }
    amax = reduce.template operator()<Max>(amax);
    const float scale = Max::apply(__fdiv_rn(amax, kFp8Max), kTokenMinScale);
    if (threadIdx.x == 0 && reduce.cta == 0) static_cast<float*>(p.quant_scale)[row] = scale;
    return scale;
  }

  __device__ __forceinline__ void quantise(uint32_t row, const Column<Form>& norm) {
    float factor = __fdiv_rn(1.0f, p.quant_arg);
    if (p.quant == kFp8Static && row == 0 && threadIdx.x == 0 && reduce.cta == 0)
      *static_cast<float*>(p.quant_scale) = p.quant_arg;
    if (p.quant == kFp8Token) factor = token_factor(row, norm);
#pragma unroll Form::kUnroll
    for (int v = 0; v < trips(); ++v) {
      const int at = vec(v);
      const bool active = at < p.vecs;
      float f[8];
      unpack<T>(active ? norm.get(v) : make_uint4(0, 0, 0, 0), f);
      if (p.quant >= kNvfp4Linear) {
        store_nvfp4(p, row, at, active, f);  // by all lanes: neighbours share a block
      } else if (active) {
#pragma unroll
        for (int j = 0; j < 8; ++j) f[j] = p.quant == kFp8Static ? __fmul_rn(f[j], factor) : __fdiv_rn(f[j], factor);
        store_fp8(p, row, at, f);
      }
    }
    if (p.quant == kNvfp4Swizzled && reduce.cta == 0) zero_scales(p, row, p.vecs / 2);
  }

  // Scale rows past the last token, up to the end of their tile.
  __device__ __forceinline__ void zero_tail_rows(uint32_t first_token, uint32_t step) const {
    if (p.quant != kNvfp4Swizzled || reduce.cta != 0 || p.token_base + p.tokens != p.call_tokens) return;
    const uint64_t end = (static_cast<uint64_t>(p.call_tokens) + kTileRows - 1) / kTileRows * kTileRows;
    for (uint64_t row = static_cast<uint64_t>(p.call_tokens) + first_token; row < end; row += step)
      zero_scales(p, row, 0);
  }
};

}  // namespace moe_tail
