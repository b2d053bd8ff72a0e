// C functions around FlashInfer's own launcher, from its own header and unchanged. Every rank count and dtype that a
// tail may ask for is in one library: eight kernels. No Python, no torch: addresses in, an error text out.
#include "flashinfer/comm/trtllm_moe_allreduce_fusion.cuh"

#include <cstdint>
#include <exception>
#include <string>

#define MOE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

namespace theirs = flashinfer::trtllm_moe_allreduce_fusion;

// A call of more than 128 tokens logs a warning at every launch, to the standard output of whoever calls.
[[maybe_unused]] const bool quiet = (spdlog::set_level(spdlog::level::err), true);

// class _Call in header.py. dtype: 0 bfloat16, 1 float16.
struct Call {
  void* table;
  void* rows;
  void* weights;
  void* map;
  void* shared;
  void* residual;
  void* gamma;
  void* residual_out;
  void* norm_out;
  void* stream;
  int32_t dtype, ranks, rank, tokens, hidden, top_k, pdl;
  float scale, eps, weight_bias;
};
static_assert(sizeof(Call) == 120, "class _Call in header.py has this size");

thread_local std::string failure;

int report(cudaError_t error, const char* during) {
  if (error == cudaSuccess) return 0;
  failure = std::string(during) + ": " + cudaGetErrorString(error);
  return 1;
}

// The one form that a tail uses: residual and norm are stored, nothing is quantised.
template <typename T, int N>
struct Kernel {
  static const void* address() {
    return reinterpret_cast<const void*>(
        theirs::moefinalize_allreduce_fusion_kernel_oneshot_lamport<T, N, true, true, false>);
  }

  static cudaError_t launch(const Call& call) {
    theirs::MoeFinalizeAllReduceFusionParams<T> p{};
    p.nranks = N;
    p.rank = call.rank;
    p.size = call.tokens * call.hidden;
    p.hidden_dim = call.hidden;
    p.workspace = static_cast<void**>(call.table);
    p.residual_in = call.residual;
    p.residual_out = call.residual_out;
    p.norm_out = call.norm_out;
    p.rms_gamma = call.gamma;
    p.rms_eps = call.eps;
    p.weight_bias = call.weight_bias;
    p.stream = static_cast<cudaStream_t>(call.stream);
    p.top_k = call.top_k;
    p.allreduce_in = call.rows;
    p.expert_scale_factor = call.weights;
    p.shared_expert_output = call.shared;
    p.expanded_idx_to_permuted_idx = static_cast<int32_t*>(call.map);
    p.routed_scaling_factor = call.scale;
    return theirs::moefinalize_allreduce_fusion_kernel_launcher<T, N, true, true, false>(p, call.pdl != 0);
  }
};

template <typename T, typename Use>
int with_ranks(int32_t ranks, Use use) {
  switch (ranks) {
    case 2: return use(Kernel<T, 2>());
    case 4: return use(Kernel<T, 4>());
    case 8: return use(Kernel<T, 8>());
    case 16: return use(Kernel<T, 16>());
  }
  failure = "no kernel for " + std::to_string(ranks) + " ranks";
  return 1;
}

template <typename Use>
int with_kernel(int32_t dtype, int32_t ranks, Use use) {
  return dtype == 0 ? with_ranks<__nv_bfloat16>(ranks, use) : with_ranks<half>(ranks, use);
}

}  // namespace

// What went wrong in this thread's last call that returned 1.
MOE_EXPORT const char* moe_flashinfer_failure() { return failure.c_str(); }

// Loads a kernel on the current device, before any rank may wait: a module loaded at a launch can wait for the device.
MOE_EXPORT int moe_flashinfer_load(int32_t dtype, int32_t ranks, int32_t* max_cluster) {
  return with_kernel(dtype, ranks, [&](auto kernel) {
    cudaFuncAttributes found{};
    if (report(cudaFuncGetAttributes(&found, kernel.address()), "loading the kernel")) return 1;
    // What their launcher asks since 0.6.17; where the driver cannot say, it too goes on with 1.
    cudaLaunchConfig_t config{};
    config.gridDim = 8;
    config.blockDim = 128;
    *max_cluster = 0;
    if (cudaOccupancyMaxPotentialClusterSize(max_cluster, kernel.address(), &config) != cudaSuccess || *max_cluster < 1) {
      (void)cudaGetLastError();
      *max_cluster = 1;
    }
    return 0;
  });
}

// Clusters of this shape that the current device holds at a time.
MOE_EXPORT int moe_flashinfer_resident(int32_t dtype, int32_t ranks, int32_t cluster, int32_t threads, int32_t* count) {
  return with_kernel(dtype, ranks, [&](auto kernel) {
    cudaLaunchAttribute shape{};
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim.x = cluster;
    shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = cluster;
    config.blockDim = threads;
    config.attrs = &shape;
    config.numAttrs = 1;
    return report(cudaOccupancyMaxActiveClusters(count, kernel.address(), &config), "occupancy of the kernel");
  });
}

// Launches one rank's part on its stream, which is of the current device.
MOE_EXPORT int moe_flashinfer_run(const Call* call) {
  try {
    return with_kernel(call->dtype, call->ranks,
                       [&](auto kernel) { return report(kernel.launch(*call), "launching the kernel"); });
  } catch (const std::exception& error) {
    failure = error.what();
    return 1;
  }
}
