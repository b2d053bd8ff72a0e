// Waiting: programmatic dependent launch, clusters, sums over the threads that share a token.
#pragma once

#include <cstdint>

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
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void store_in_cluster(float* at, uint32_t cta, float v) {
  const uint32_t local = static_cast<uint32_t>(__cvta_generic_to_shared(at));
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2; }" ::"r"(local),
      "r"(cta), "f"(v)
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
constexpr int kMaxRanksAlone = 2;  // of a block that holds a token alone: its registers have room for one peer
constexpr int max_warps(int blocks) { return blocks == 1 ? 28 : 16; }  // of one block: 896 threads, 512 in a cluster

// Reduces over the threads of a block or cluster; every thread gets the same bits, because each adds the same partial
// values in the same tree. Two scratch rows used in turn make one barrier enough: a row is written again two
// reductions later, and the barrier in between was passed by every reader of the first.
template <int C>
struct TokenReduce {
  static constexpr int kWarps = C * max_warps(C);
  float* rows;  // [2][kWarps] in shared memory
  uint32_t cta;
  int turn = 0;

  template <typename Op>
  __device__ __forceinline__ float operator()(float v) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
#pragma unroll
    for (int o = 16; o; o >>= 1) v = Op::apply(v, __shfl_xor_sync(~0u, v, o));
    float* row = rows + turn * kWarps;
    turn ^= 1;
    if constexpr (C == 1) {
      if (lane == 0) row[warp] = v;
      __syncthreads();
    } else {
      if (lane < C) store_in_cluster(row + cta * warps + warp, lane, v);
      cluster_arrive();
      cluster_wait();
    }
    const int n = warps * C;
    v = lane < n ? row[lane] : 0.0f;
    if (kWarps > 32 && lane + 32 < n) v = Op::apply(v, row[lane + 32]);
#pragma unroll
    for (int o = 16; o; o >>= 1) v = Op::apply(v, __shfl_xor_sync(~0u, v, o));
    return v;
  }
};

}  // namespace moe_tail
