// Thin shim over apache-tvm-ffi: integers, floats and addresses in, an error text out. It owns nothing but the Plan.
#include <cuda_runtime.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <vector>

#include "launch.h"

namespace {

using moe_tail::Config;
using moe_tail::Params;

// What stays the same from call to call of one opened tail.
struct Plan {
  Params base{};
  std::vector<Config> configs;
  int device = 0;
};

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorString(error);
}

template <typename T>
T* address(int64_t value) {
  return reinterpret_cast<T*>(static_cast<intptr_t>(value));
}

void load() { check(moe_tail::load_kernels(), "loading the kernels"); }

int64_t resident(int64_t threads, int64_t cluster, int64_t two_shot, int64_t vecs, bool quant) {
  int groups = 0;
  const Config config{0, static_cast<int32_t>(threads), static_cast<int32_t>(cluster), static_cast<int32_t>(two_shot), 0, 0};
  check(moe_tail::resident_groups(config, static_cast<int32_t>(vecs), quant, &groups), "occupancy of the kernels");
  return groups;
}

// `memory`: epochs, aborted, report, stall; `configs`: six numbers each, ordered by max_tokens.
int64_t create(int64_t device, int64_t rank, int64_t vecs, int64_t top_k, int64_t slot_tokens, int64_t timeout_ns,
               tvm::ffi::Array<int64_t> memory, tvm::ffi::Array<int64_t> slots, tvm::ffi::Array<int64_t> configs) {
  auto* plan = new Plan;
  plan->device = static_cast<int>(device);
  Params& base = plan->base;
  base.rank = static_cast<int32_t>(rank);
  base.vecs = static_cast<int32_t>(vecs);
  base.top_k = static_cast<int32_t>(top_k);
  base.slot_tokens = slot_tokens;
  base.timeout_ns = static_cast<uint64_t>(timeout_ns);
  base.epochs = address<uint32_t>(memory[0]);
  base.aborted = address<uint32_t>(memory[1]);
  base.report = address<moe_tail::Report>(memory[2]);
  base.stall_ns = address<const uint64_t>(memory[3]);
  for (size_t r = 0; r < slots.size(); ++r) base.slots[r] = address<void>(slots[r]);
  for (size_t i = 0; i + 6 <= configs.size(); i += 6)
    plan->configs.push_back({configs[i], static_cast<int32_t>(configs[i + 1]), static_cast<int32_t>(configs[i + 2]),
                             static_cast<int32_t>(configs[i + 3]), static_cast<int32_t>(configs[i + 4]),
                             static_cast<int32_t>(configs[i + 5])});
  return reinterpret_cast<intptr_t>(plan);
}

void destroy(int64_t plan) { delete address<Plan>(plan); }

// `choice`: index of a configuration, or negative for the first whose max_tokens covers the call.
void run(int64_t handle, int64_t choice, int64_t tokens, int64_t rows, int64_t weights, int64_t map, int64_t shared,
         int64_t residual, int64_t gamma, int64_t residual_out, int64_t norm_out, int64_t quant_out,
         int64_t quant_scale, int64_t quant, int64_t flags, bool weights_fp32, bool gamma_fp32, double scale,
         double eps, double weight_bias, double quant_arg, int64_t stream) {
  const Plan& plan = *address<const Plan>(handle);
  Params p = plan.base;
  p.call_tokens = tokens;
  if (map == 0) p.top_k = 1;  // finalized: one row a token, as it is
  p.rows = address<const void>(rows);
  p.weights = address<const void>(weights);
  p.map = address<const int32_t>(map);
  p.shared = address<const void>(shared);
  p.residual = address<const void>(residual);
  p.gamma = address<const void>(gamma);
  p.residual_out = address<void>(residual_out);
  p.norm_out = address<void>(norm_out);
  p.quant_out = address<void>(quant_out);
  p.quant_scale = address<void>(quant_scale);
  p.quant = static_cast<int32_t>(quant);
  p.flags = static_cast<int32_t>(flags);
  p.weights_fp32 = weights_fp32;
  p.gamma_fp32 = gamma_fp32;
  p.scale = static_cast<float>(scale);
  p.eps = static_cast<float>(eps);
  p.weight_bias = static_cast<float>(weight_bias);
  p.quant_arg = static_cast<float>(quant_arg);
  size_t index = choice < 0 ? 0 : static_cast<size_t>(choice);
  if (choice < 0)
    while (index + 1 < plan.configs.size() && tokens > plan.configs[index].max_tokens) ++index;
  int current = 0;
  check(cudaGetDevice(&current), "current device");
  if (current != plan.device) check(cudaSetDevice(plan.device), "switching to the tail's device");
  const cudaError_t error = moe_tail::launch(p, plan.configs.at(index), address<CUstream_st>(stream));
  if (current != plan.device) check(cudaSetDevice(current), "switching back");
  check(error, "launch");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(load, load);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(resident, resident);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(create, create);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(destroy, destroy);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
