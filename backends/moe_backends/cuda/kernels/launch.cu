// Host side of one variant. MOE_DTYPE (0: bfloat16, 1: float16) and MOE_RANKS come from the build.
#include "launch.h"

#include <algorithm>

#include "tail.cuh"

#if MOE_DTYPE == 0
using Element = __nv_bfloat16;
#else
using Element = __half;
#endif

namespace moe_tail {
namespace {

using Kernel = void (*)(const Params);
constexpr int kRanks = MOE_RANKS;

Kernel kernel_of(const Config& config, bool quant) {
  if (config.cluster == 4)
    return quant ? held_tail<Element, kRanks, 4, true> : held_tail<Element, kRanks, 4, false>;
  if (config.cluster == 2)
    return quant ? held_tail<Element, kRanks, 2, true> : held_tail<Element, kRanks, 2, false>;
  if (config.cluster == 1)
    return quant ? held_tail<Element, kRanks, 1, true> : held_tail<Element, kRanks, 1, false>;
  if constexpr (kRanks > 1) {
    if (config.two_shot)
      return quant ? looped_tail<Element, kRanks, true, true> : looped_tail<Element, kRanks, true, false>;
  }
  return quant ? looped_tail<Element, kRanks, false, true> : looped_tail<Element, kRanks, false, false>;
}

int32_t trips(const Config& config, int32_t vecs) { return (vecs + config.threads - 1) / config.threads; }

size_t shared_bytes(const Config& config, int32_t vecs) {
  if (config.cluster > 0) return 0;
  const int tokens = kRanks > 1 ? 2 : 1;  // contributed and not finished, and the one before
  const size_t vectors = RowPipe<Element, kRanks == 1>::kVectors + tokens * trips(config, vecs);
  return vectors * config.threads * sizeof(uint4);
}

struct Launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute attributes[2];

  Launch(const Config& chosen, int32_t vecs, uint32_t groups, bool pdl, cudaStream_t stream) {
    config.gridDim = dim3(groups * std::max(1, chosen.cluster));
    config.blockDim = dim3(chosen.threads);
    config.dynamicSmemBytes = shared_bytes(chosen, vecs);
    config.stream = stream;
    config.attrs = attributes;
    if (chosen.cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(chosen.cluster), 1, 1};
      ++config.numAttrs;
    }
    if (pdl) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
      ++config.numAttrs;
    }
  }
};

}  // namespace

cudaError_t load_kernels() {
  int device = 0, most = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  for (int cluster : {0, 1, 2, kMaxCluster})
    for (int two_shot : {0, 1})
      for (bool quant : {false, true}) {
        if (error != cudaSuccess) return error;
        const Kernel kernel = kernel_of(Config{0, 32, cluster, two_shot, 0, 0}, quant);
        cudaFuncAttributes found;
        error = cudaFuncGetAttributes(&found, kernel);
        if (error == cudaSuccess) {
          const int room = most - static_cast<int>(found.sharedSizeBytes);
          error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
        }
      }
  return error;
}

cudaError_t resident_groups(const Config& config, int32_t vecs, bool quant, int* groups) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  const Kernel kernel = kernel_of(config, quant);
  if (config.cluster > 1) {
    Launch shape(config, vecs, processors, false, nullptr);
    return cudaOccupancyMaxActiveClusters(groups, kernel, &shape.config);
  }
  error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(groups, kernel, config.threads, shared_bytes(config, vecs));
  *groups *= processors;
  return error;
}

cudaError_t launch(Params params, const Config& config, cudaStream_t stream) {
  if (params.call_tokens > kMaxTokens) return cudaErrorInvalidValue;
  const bool quant = params.quant != kNoQuant;
  const Kernel kernel = kernel_of(config, quant);
  const uint32_t limit = static_cast<uint32_t>(quant ? config.max_groups_quant : config.max_groups);
  const uint32_t most = kRanks > 1 ? params.slot_tokens : params.call_tokens;
  params.vecs_per_thread = trips(config, params.vecs);
  params.row_bytes = static_cast<uint32_t>(params.vecs * sizeof(uint4));
  params.source_bytes = static_cast<uint64_t>(params.slot_tokens) * params.row_bytes;
  params.generation_bytes = (kRanks - 1) * params.source_bytes;
  params.inverse_hidden = 1.0f / static_cast<float>(params.vecs * kVecElems);
  for (params.token_base = 0; params.token_base < params.call_tokens; params.token_base += most) {
    params.tokens = std::min(most, params.call_tokens - params.token_base);
    if (config.cluster > 0 && params.tokens > limit) return cudaErrorInvalidValue;  // each group holds one token
    const uint32_t groups = std::min(params.tokens, limit);
    const Launch shape(config, params.vecs, groups, params.flags & kPdl, stream);
    const cudaError_t error = cudaLaunchKernelEx(&shape.config, kernel, static_cast<const Params>(params));
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace moe_tail
