// The fused tail: finalize, shared output, all-reduce over ranks, residual, RMSNorm, quantise. One kernel, one pass, in
// two forms that give the same bits.
#pragma once

#include "held_tail.cuh"
#include "looped_tail.cuh"

namespace moe_tail {

// Registers a thread, of a multiprocessor's 65,536: the fewest that keep all rows in flight. A block that holds a token
// alone has up to 512 threads, two vectors each. At H 7168 two clusters of two blocks, or three of four, share four
// multiprocessors; the addresses of sixteen ranks take more. Blocks that loop should be resident two by two; from four
// ranks on, the vectors of several peers are in flight.
constexpr int held_registers(int ranks, int cluster, bool quant) {
  return cluster == 1 ? 128 : quant || ranks > 8 ? 112 : cluster == 2 ? 72 : 80;
}
constexpr int looped_registers(int ranks) { return ranks < 4 ? 72 : 96; }

template <typename T, int N, int kCluster, bool kQuant>
__global__ void __maxnreg__(held_registers(N, kCluster, kQuant)) held_tail(const __grid_constant__ Params p) {
  run_held<T, N, kCluster, kQuant>(p);
}

template <typename T, int N, bool kTwoShot, bool kQuant>
__global__ void __maxnreg__(looped_registers(N)) looped_tail(const __grid_constant__ Params p) {
  run_looped<T, N, kTwoShot, kQuant>(p);
}

}  // namespace moe_tail
