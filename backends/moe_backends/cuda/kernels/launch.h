// The C interface of one compiled variant: one activation dtype, one number of ranks. Free of any binding.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace moe_tail {

// One way to run calls of up to `max_tokens` tokens.
struct Config {
  int64_t max_tokens;
  int32_t threads;   // of a block
  int32_t cluster;   // blocks that hold a token: 1, 2 or 4; 0: a block that loops over tokens and vectors
  int32_t two_shot;  // 0 or 1
  int32_t max_groups;        // blocks (or clusters) of this rank resident together, hence the grid's limit
  int32_t max_groups_quant;  // the same for calls with a quantised output, whose kernel takes more registers
};

// Loads every kernel of this variant now. A kernel that is loaded at its first launch may wait for the device, on
// which a peer may already wait for this rank.
cudaError_t load_kernels();

// How many blocks (or clusters) of this configuration are resident on the current device together.
cudaError_t resident_groups(const Config& config, int32_t vecs, bool quant, int* groups);

// Launches the tail over `params.call_tokens` tokens, in as many launches as the token slots ask for.
// `params.tokens`, `token_base`, `vecs_per_thread` and `inverse_hidden` are set here.
cudaError_t launch(Params params, const Config& config, cudaStream_t stream);

}  // namespace moe_tail
