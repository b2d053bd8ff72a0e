// What one launch of the tail is told. Plain data, shared by host and device code.
#pragma once

#include <cstdint>

namespace moe_tail {

constexpr int kMaxRanks = 16;
constexpr int kMaxTopK = 32;       // one lane of a warp holds one slot's index and weight
constexpr int kHeldAlone = 2;      // vectors a thread has of a token that one block holds alone
constexpr int kGenerations = 2;    // receive slots per token and source; docs/cuda-consumer.md proves that two suffice
constexpr uint32_t kMaxTokens = 1u << 31;  // of a call: a sum of two token numbers fits in 32 bits
constexpr int kVecElems = 8;       // 16-bit elements in a 16-byte vector, the widest access of a thread
constexpr uint32_t kArmed = 0xFFFFFFFFu;  // two 16-bit NaNs that no conversion from float ever produces (those give 0x7FFF)

enum Quant : int { kNoQuant = 0, kFp8Static = 1, kFp8Token = 2, kNvfp4Linear = 3, kNvfp4Swizzled = 4 };

enum Flag : int {
  kSolo = 1,  // read receive slots as they are, never wait, leave their contents: times one rank alone
  kPdl = 2,   // programmatic dependent launch: start while the previous kernel of the stream drains
};

// Host-mapped; the first wait that runs out writes it, Python reads it.
struct Report {
  uint32_t raised;
  uint32_t rank;
  uint32_t peer;
  uint32_t epoch;
  uint64_t token;
};

struct Params {
  // Inputs. `map` null: `rows` is a finalized [tokens, H]. `shared`, `weights` may be null then or always.
  const void* rows;
  const void* weights;
  const int32_t* map;
  const void* shared;
  const void* residual;
  const void* gamma;
  // Outputs; each may be null.
  void* residual_out;
  void* norm_out;
  void* quant_out;
  void* quant_scale;
  // Exchange. slots[r]: rank r's receive slots, 16-byte vectors [generation][source != r][slot_tokens][H / 8].
  void* slots[kMaxRanks];
  uint32_t* epochs;   // [slot_tokens], this rank's; how often each token slot was used
  uint32_t* aborted;  // one word, this rank's; set once a wait has run out
  Report* report;
  const uint64_t* stall_ns;  // test builds only: [3], before push, between push and poll, after poll
  uint64_t timeout_ns;
  uint64_t source_bytes;      // of one source's receive slots in one generation, set by launch
  uint64_t generation_bytes;  // of one generation of receive slots, set by launch
  uint32_t slot_tokens;
  uint32_t tokens;      // of this launch
  uint32_t token_base;  // of the call, where it takes several launches
  uint32_t call_tokens;
  uint32_t row_bytes;  // of an activation row, set by launch
  int32_t vecs;  // H / 8
  int32_t vecs_per_thread;  // single blocks: ceil(vecs / threads)
  int32_t top_k;
  int32_t rank;
  int32_t quant;
  int32_t flags;
  int32_t weights_fp32;
  int32_t gamma_fp32;
  float scale;
  float inverse_hidden;  // 1 / H, set by launch
  float eps;
  float weight_bias;
  float quant_arg;  // fp8 static: the scale; NVFP4: the global scale
};

}  // namespace moe_tail
