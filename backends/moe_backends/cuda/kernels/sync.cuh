// Waiting: programmatic dependent launch, clusters, sums over the threads that share a token.
#pragma once

#include <cstdint>

#include "vec.cuh"

namespace moe_tail {

// Everything that earlier kernels of the stream wrote is visible after it; returns at once without a dependent launch.
__device__ __forceinline__ void wait_for_stream() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void release_stream() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

__device__ __forceinline__ uint64_t now_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(r));
  return r;
}
// Publishes nothing but barriers in shared memory (open_after).
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A barrier in shared memory that opens once `bytes` have arrived. One thread makes it, before the cluster's barrier.
__device__ __forceinline__ void open_after(uint64_t* barrier, uint32_t bytes) {
  const uint32_t at = shared_address(barrier);
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at) : "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait_until_open(uint64_t* barrier) {
  uint32_t open = 0;
  do {
    asm volatile(
        "{ .reg .pred open; mbarrier.try_wait.parity.shared::cta.b64 open, [%1], 0; selp.u32 %0, 1, 0, open; }"
        : "=r"(open)
        : "r"(shared_address(barrier))
        : "memory");
  } while (open == 0);
}

// Stores `v` at the same place in block `cta` of the cluster and tells that block's barrier. Unlike a store that a
// cluster barrier publishes, it does not wait for the stores to global memory before it.
__device__ __forceinline__ void store_in_cluster(float* at, uint64_t* barrier, uint32_t cta, float v) {
  asm volatile(
      "{ .reg .b32 there, told; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 told, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %3, [told]; }" ::"r"(shared_address(at)),
      "r"(shared_address(barrier)), "r"(cta), "r"(__float_as_uint(v))
      : "memory");
}

struct Sum {
  static __device__ __forceinline__ float apply(float a, float b) { return a + b; }
};
struct Max {  // of magnitudes; a NaN wins, as in torch.amax
  static __device__ __forceinline__ float apply(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
  }
};

constexpr int kMaxCluster = 4;
constexpr int kMaxWarps = 16;       // of a block: 512 threads
constexpr int kMostReductions = 2;  // of a token: the sum of squares, then the largest magnitude (fp8 per token)

template <int C>
struct ClusterBarriers {
  uint64_t barriers[kMostReductions];
};
template <>
struct ClusterBarriers<1> {};

// Reduces over the threads of a block or cluster; every thread gets the same bits, because each adds the same partial
// values in the same tree. Scratch rows are used in turn, which makes one barrier enough: in a block that loops, a row is
// written again two reductions later, and the barrier in between was passed by every reader of the first. A cluster takes
// one token, so that each of its barriers opens once.
template <int C>
struct TokenReduce {
  struct alignas(128) Scratch : ClusterBarriers<C> {
    float rows[kMostReductions][C * kMaxWarps];
  };
  Scratch& scratch;
  uint32_t cta;
  int turn = 0;

  // By every thread, first of all: no block may write into another's memory before that one has started.
  __device__ __forceinline__ void begin() {
    if constexpr (C > 1) {
      if (threadIdx.x == 0) {
        const uint32_t bytes = C * (blockDim.x >> 5) * sizeof(float);
#pragma unroll
        for (int i = 0; i < kMostReductions; ++i) open_after(&scratch.barriers[i], bytes);
      }
      cluster_arrive();
    }
  }

  // By every thread, before the first reduction.
  __device__ __forceinline__ void wait_for_blocks() {
    if constexpr (C > 1) cluster_wait();
  }

  template <typename Op>
  __device__ __forceinline__ float operator()(float v) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#pragma unroll
    for (int o = 16; o; o >>= 1) v = Op::apply(v, __shfl_xor_sync(~0u, v, o));
    float* row = scratch.rows[turn];
    if constexpr (C == 1) {
      if (lane == 0) row[warp] = v;
      __syncthreads();
    } else {
      uint64_t* barrier = &scratch.barriers[turn];
      if (lane < C) store_in_cluster(row + cta * warps + warp, barrier, lane, v);
      wait_until_open(barrier);
    }
    turn ^= 1;
    const int n = warps * C;
    v = lane < n ? row[lane] : 0.0f;
    if (C * kMaxWarps > 32 && lane + 32 < n) v = Op::apply(v, row[lane + 32]);
#pragma unroll
    for (int o = 16; o; o >>= 1) v = Op::apply(v, __shfl_xor_sync(~0u, v, o));
    return v;
  }
};

}  // namespace moe_tail
