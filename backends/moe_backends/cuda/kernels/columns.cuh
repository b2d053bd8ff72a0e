// How the vectors of a token are divided over threads, and where a thread keeps its own until the token is done.
#pragma once

#include "params.h"

namespace moe_tail {

// A block that takes token after token; a thread has `vecs_per_thread` vectors of each.
struct Looped {
  static constexpr bool kHeld = false;
  static constexpr int kBlocks = 1, kUnroll = 1;
  static __device__ __forceinline__ int trips(const Params& p) { return p.vecs_per_thread; }
};

// kCluster blocks that hold one token in registers: two vectors a thread in a block alone, one in a cluster.
template <int kCluster>
struct Held {
  static constexpr bool kHeld = true;
  static constexpr int kBlocks = kCluster, kVectors = kCluster == 1 ? kHeldAlone : 1, kUnroll = kVectors;
  static __device__ __forceinline__ int trips(const Params&) { return kVectors; }
};

// One token's vectors of one thread: its contribution, later the rounded residual, then the norm.
template <typename Form>
struct Column {
  uint4 vectors[Form::kVectors];
  __device__ __forceinline__ uint4 get(int v) const { return vectors[v]; }
  __device__ __forceinline__ void set(int v, uint4 x) { vectors[v] = x; }
};

template <>
struct Column<Looped> {
  uint4* stage;  // of [vecs_per_thread][threads] in shared memory
  __device__ __forceinline__ uint4 get(int v) const { return stage[v * blockDim.x]; }
  __device__ __forceinline__ void set(int v, uint4 x) { stage[v * blockDim.x] = x; }
};

}  // namespace moe_tail
