// Receive slots: push to a peer, wait on one's own, re-arm. The protocol and its proof: docs/cuda-consumer.md.
#pragma once

#include "params.h"
#include "sync.cuh"
#include "vec.cuh"

namespace moe_tail {

__device__ __forceinline__ bool is_armed(uint4 v) {
  return v.x == kArmed || v.y == kArmed || v.z == kArmed || v.w == kArmed;
}

// Where a token's vector lies in the slots of a source, in bytes.
__device__ __forceinline__ uint64_t slot_offset(const Params& p, uint32_t epoch, uint32_t token, int vec) {
  const uint64_t generation = epoch % kGenerations ? p.generation_bytes : 0;
  return generation + static_cast<uint64_t>(token) * p.row_bytes + static_cast<uint32_t>(vec) * sizeof(uint4);
}

// The slot in rank `owner`'s memory that rank `source` writes.
__device__ __forceinline__ uint4* slot(const Params& p, int owner, int source, uint64_t offset) {
  const uint32_t place = source - (source > owner ? 1 : 0);
  return reinterpret_cast<uint4*>(static_cast<char*>(p.slots[owner]) + place * p.source_bytes + offset);
}

// Reports a wait that ran out, once per rank, and makes every other wait of this rank end.
__device__ __forceinline__ void report_timeout(const Params& p, int peer, uint32_t token, uint32_t epoch) {
  if (atomicExch(p.aborted, 1u) == 0u) {
    volatile Report* r = p.report;
    r->rank = p.rank;
    r->peer = peer;
    r->epoch = epoch;
    r->token = p.token_base + token;
    __threadfence_system();
    r->raised = 1;
    __threadfence_system();
  }
}

// Waits until `source` has written, then re-arms the slot. A wait that runs out returns what is there: NaN.
__device__ __forceinline__ uint4 await(const Params& p, uint4* at, uint4 got, int source, uint32_t epoch,
                                       uint32_t token) {
  if (is_armed(got)) {
    uint64_t start = 0;
    for (uint32_t spins = 1; is_armed(got); ++spins) {
      if (p.flags & kSolo) break;
#ifndef MOE_TEST_NO_TIMEOUT  // only to measure what the bound costs
      if ((spins & 63u) == 0u) {  // the clock is read once in 64 polls, so a wait costs nothing until it is long
        const uint64_t now = now_ns();
        if (start == 0) start = now;
        const bool gone = *static_cast<volatile uint32_t*>(p.aborted) != 0u;
        if (gone || now - start > p.timeout_ns) {
          report_timeout(p, source, token, epoch);
          break;
        }
      }
#endif
      got = load_shared(at);
    }
  }
  *at = (p.flags & kSolo) ? got : make_uint4(kArmed, kArmed, kArmed, kArmed);
  return got;
}

#ifdef MOE_TEST_STALL
__device__ __forceinline__ void test_stall(const Params& p, int point) {
  if (p.stall_ns == nullptr) return;
  const uint64_t wait = static_cast<const volatile uint64_t*>(p.stall_ns)[point], start = now_ns();
  while (now_ns() - start < wait) {
  }
}
#else
__device__ __forceinline__ void test_stall(const Params&, int) {}
#endif

}  // namespace moe_tail
