// 16-byte vectors of 16-bit elements: loads, stores, conversions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace moe_tail {

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Global to shared memory without registers in between; past L1.
__device__ __forceinline__ void copy_async(uint32_t to, const uint4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ uint4 load_staged(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at));
  return v;
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLast>
__device__ __forceinline__ void wait_for_all_copies_but() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLast) : "memory");
}

// A vector of a row: base + row * row_bytes, one multiply-add to 64 bits.
__device__ __forceinline__ uint64_t row_address(const void* base, uint32_t row, uint32_t row_bytes) {
  uint64_t at;
  asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(at) : "r"(row), "r"(row_bytes), "l"(base));
  return at;
}
__device__ __forceinline__ const uint4* vector_at(const void* base, uint32_t row, uint32_t row_bytes, int vec) {
  return reinterpret_cast<const uint4*>(row_address(base, row, row_bytes)) + vec;
}
__device__ __forceinline__ uint4* vector_at(void* base, uint32_t row, uint32_t row_bytes, int vec) {
  return reinterpret_cast<uint4*>(row_address(base, row, row_bytes)) + vec;
}

// What is read once takes no room in L1.
__device__ __forceinline__ uint4 load_once(const uint4* at) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at));
  return v;
}

__device__ __forceinline__ void store(uint4* at, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// System scope, because the other side may be another GPU. A vector is four 32-bit accesses in any order.
__device__ __forceinline__ uint4 load_shared(const uint4* at) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(uint4* at, uint4 v) {
  asm volatile("st.relaxed.sys.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// Two 16-bit elements to float and back. The conversion back rounds to nearest even and turns every NaN into 0x7FFF,
// so that a published value is never the armed pattern (PTX: cvt to f16x2 and bf16x2 gives the canonical NaN).
template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ float2 unpack(uint32_t w) {
    return {__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)};
  }
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t w;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ float2 unpack(uint32_t w) {
    return __half22float2(*reinterpret_cast<__half2*>(&w));
  }
  static __device__ __forceinline__ uint32_t pack(float lo, float hi) {
    uint32_t w;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(hi), "f"(lo));
    return w;
  }
};

template <typename T>
__device__ __forceinline__ void unpack(uint4 v, float (&f)[8]) {
  const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 p = Pair<T>::unpack(w[i]);
    f[2 * i] = p.x;
    f[2 * i + 1] = p.y;
  }
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float (&f)[8]) {
  return {Pair<T>::pack(f[0], f[1]), Pair<T>::pack(f[2], f[3]), Pair<T>::pack(f[4], f[5]), Pair<T>::pack(f[6], f[7])};
}

// 1 / sqrt(x) within 1 unit in the last place: the hardware's estimate (2 units) and one Newton step, an eighth of the
// instructions of an exact root and an exact division. 0 and infinity, on which the step gives NaN, keep the estimate.
__device__ __forceinline__ float inverse_root(float x) {
  const float r = rsqrtf(x);
  const float better = __fmaf_rn(__fmul_rn(0.5f, r), __fmaf_rn(-__fmul_rn(x, r), r, 1.0f), r);
  return better == better ? better : r;
}

template <typename T>
__device__ __forceinline__ float scalar(const void* base, int64_t at) {
  return static_cast<float>(static_cast<const T*>(base)[at]);
}

}  // namespace moe_tail
