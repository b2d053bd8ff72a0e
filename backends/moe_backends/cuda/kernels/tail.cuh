// The fused tail: finalize, shared output, all-reduce over ranks, residual, RMSNorm, quantise. One kernel, one pass.
//
// A block (C = 1) or a cluster of C blocks takes whole tokens, `gridDim / C` apart. With ranks, a token's contribution
// is pushed before the previous token's is waited for, so that the trip to the peers hides behind the next token's
// loads. Two forms of one code: kEager holds one vector a thread and asks for everything before it needs it (few
// tokens: the shortest chain of loads wins); otherwise a block loops over `vecs_per_thread`
// vectors, whose rows flow through a pipe in shared memory (many tokens: memory that is never idle wins).
#pragma once

#include "exchange.cuh"
#include "local_sum.cuh"
#include "quant.cuh"

namespace moe_tail {

template <bool kEager>
struct Local;  // a token's contribution, pushed but not reduced yet; later its rounded residual, then its norm

template <>
struct Local<true> {
  uint4 own;
  uint4 residual;
  uint32_t epoch;
  __device__ __forceinline__ uint4 get(int) const { return own; }
  __device__ __forceinline__ void set(int, uint4 v) { own = v; }
};

template <>
struct Local<false> {
  uint4* stage;  // this thread's column of [vecs_per_thread][threads] in shared memory
  uint32_t epoch;
  __device__ __forceinline__ uint4 get(int v) const { return stage[v * blockDim.x]; }
  __device__ __forceinline__ void set(int v, uint4 x) { stage[v * blockDim.x] = x; }
};

template <typename T, int N, int C, bool kEager, bool kTwoShot, bool kQuant>
struct Tail {
  static constexpr int kSources = N > 8 ? 4 : N;  // peers' vectors requested before the first is waited for
  using Token = Local<kEager>;
  // kEager asks for eight rows at once and keeps few bytes, so that many tokens are resident; the other form asks for
  // the next four while the last four are added up.
  // Eight vectors together fit in the registers of up to two ranks; for 10.0 the compiler spills them.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  static constexpr int kTogether = 4;
#else
  static constexpr int kTogether = N <= 2 ? 8 : 4;
#endif
  using Pipe = RowPipe<T, N == 1 || kEager, kEager ? 8 : 4, kEager ? 1 : 2, kTogether>;

  const Params& p;
  TokenReduce<C>& reduce;
  Pipe& pipe;
  const int first;  // vectors first, first + step, ... are this thread's

  __device__ __forceinline__ int trips() const { return kEager ? 1 : p.vecs_per_thread; }
  __device__ __forceinline__ int vec(int v) const { return first + v * static_cast<int>(blockDim.x); }

  __device__ __forceinline__ uint4 load(const void* base, int64_t row, int at) const {
    return static_cast<const uint4*>(base)[row * p.vecs + at];
  }

  // Local sum of a token and its push. `routes`, `next` are this token's and those of this block's next one. Without
  // ranks also the residual, since nothing has to be waited for: returns this thread's sum of squares of it.
  __device__ __forceinline__ float contribute(int64_t token, const Routes& routes, const Routes& next, Token& out) {
    const int64_t row = p.token_base + token;
    float squares = 0.0f;
    if constexpr (N > 1) out.epoch = p.epochs[token];
#pragma unroll 1
    for (int v = 0; v < trips(); ++v) {
      const int at = vec(v);
      const bool active = at < p.vecs;
      uint4 residual = make_uint4(0, 0, 0, 0);
      uint4 own = pipe.sum(token, routes, next, active, residual);
      if constexpr (N == 1) {
        float total[8];
        unpack<T>(own, total);
        own = with_residual(total, residual);
        if (active) squares += keep(row, at, own);
      } else {
        if constexpr (kEager) out.residual = residual;
        if (v == 0) test_stall(p, 0);
        if (active) push(token, out.epoch, at, own);
      }
      out.set(v, own);
    }
    if constexpr (N > 1) test_stall(p, 1);
    return squares;
  }

  __device__ __forceinline__ uint4 with_residual(float (&total)[8], uint4 residual) const {
    float f[8];
    unpack<T>(residual, f);
#pragma unroll
    for (int j = 0; j < 8; ++j) total[j] = __fadd_rn(total[j], f[j]);
    return pack<T>(total);
  }

  // Stores a vector of the rounded residual; returns its sum of squares.
  __device__ __forceinline__ float keep(int64_t row, int at, uint4 x) const {
    if (p.residual_out != nullptr) static_cast<uint4*>(p.residual_out)[row * p.vecs + at] = x;
    float f[8], squares = 0.0f;
    unpack<T>(x, f);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += f[j] * f[j];
    return squares;
  }

  __device__ __forceinline__ void push(int64_t token, uint32_t epoch, int at, uint4 own) {
    if constexpr (kTwoShot) {
      const int owner = static_cast<int>(token % N);
      if (owner != p.rank) store_shared(slot<N>(p, owner, p.rank, epoch, token, at), own);
    } else {
      broadcast(token, epoch, at, own);
    }
  }

  __device__ __forceinline__ void broadcast(int64_t token, uint32_t epoch, int at, uint4 value) {
#pragma unroll
    for (int peer = 0; peer < N; ++peer)
      if (peer != p.rank) store_shared(slot<N>(p, peer, p.rank, epoch, token, at), value);
  }

  // What a thread asks for before it waits: its residual and the first peers' vectors, or the owner's (two-shot).
  struct Incoming {
    uint4 residual;
    uint4 got[kSources];
  };

  __device__ __forceinline__ bool owns(int64_t token) const { return !kTwoShot || token % N == p.rank; }

  __device__ __forceinline__ Incoming ask(int64_t token, const Token& mine, int at) const {
    Incoming in = {};
    if (at >= p.vecs) return in;
    if (!owns(token)) {
      in.got[0] = load_shared(slot<N>(p, p.rank, static_cast<int>(token % N), mine.epoch, token, at));
      return in;
    }
    if constexpr (kEager) {
      in.residual = mine.residual;
    } else {
      in.residual = load(p.residual, p.token_base + token, at);
    }
    ask_sources(token, mine.epoch, at, 0, in);
    return in;
  }

  __device__ __forceinline__ void ask_sources(int64_t token, uint32_t epoch, int at, int base, Incoming& in) const {
#pragma unroll
    for (int i = 0; i < kSources; ++i)
      if (base + i != p.rank) in.got[i] = load_shared(slot<N>(p, p.rank, base + i, epoch, token, at));
  }

  // The rounded residual: the published contributions of all ranks, added in float32 in rank order, and the residual.
  // Two-shot: the token's owner reduces and sends it; the same bits, since every rank has the same residual and the
  // owner adds in the same order.
  __device__ __forceinline__ uint4 receive(int64_t token, const Token& mine, int v, int at, Incoming& in) {
    if (!owns(token)) {
      const int owner = static_cast<int>(token % N);
      return await(p, slot<N>(p, p.rank, owner, mine.epoch, token, at), in.got[0], owner, mine.epoch, token);
    }
    float total[8];
#pragma unroll
    for (int base = 0; base < N; base += kSources) {
      if (base > 0) ask_sources(token, mine.epoch, at, base, in);
#pragma unroll
      for (int i = 0; i < kSources; ++i) {
        const int r = base + i;
        if (r == p.rank) {
          in.got[i] = mine.get(v);
        } else {
          in.got[i] = await(p, slot<N>(p, p.rank, r, mine.epoch, token, at), in.got[i], r, mine.epoch, token);
        }
        float f[8];
        unpack<T>(in.got[i], f);
#pragma unroll
        for (int j = 0; j < 8; ++j) total[j] = r == 0 ? f[j] : __fadd_rn(total[j], f[j]);
      }
    }
    const uint4 x = with_residual(total, in.residual);
    if constexpr (kTwoShot) broadcast(token, mine.epoch, at, x);
    return x;
  }

  // Receives a whole token, one vector ahead where registers allow; returns this thread's sum of squares.
  __device__ __forceinline__ float receive_all(int64_t token, Token& mine) {
    constexpr bool kAhead = !kEager && N <= 4;
    float squares = 0.0f;
    Incoming in = ask(token, mine, vec(0)), next = {};
#pragma unroll 1
    for (int v = 0; v < trips(); ++v) {
      const int at = vec(v);
      if (at >= p.vecs) break;
      if constexpr (kAhead) next = ask(token, mine, vec(v + 1));
      const uint4 x = receive(token, mine, v, at, in);
      mine.set(v, x);
      squares += keep(p.token_base + token, at, x);
      if constexpr (kAhead) {
        in = next;
      } else if (!kEager) {
        in = ask(token, mine, vec(v + 1));
      }
    }
    test_stall(p, 2);
    return squares;
  }

  __device__ __forceinline__ void gains(int at, float (&gain)[8]) const {
    if (p.gamma_fp32) {
      const float4* from = static_cast<const float4*>(p.gamma) + 2 * at;
      const float4 lo = __ldg(from), hi = __ldg(from + 1);
      const float f[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) gain[i] = f[i] + p.weight_bias;
    } else {
      unpack<T>(__ldg(static_cast<const uint4*>(p.gamma) + at), gain);
#pragma unroll
      for (int i = 0; i < 8; ++i) gain[i] += p.weight_bias;
    }
  }

  // Waits for the ranks, then residual, norm and quantised outputs of a token. `early` is the gain if kEager;
  // `squares` comes from contribute.
  __device__ __forceinline__ void finish(int64_t token, Token& mine, bool last, float squares,
                                         const float (&early)[8]) {
    const int64_t row = p.token_base + token;
    if constexpr (N > 1) squares = receive_all(token, mine);
    squares = reduce.template operator()<Sum>(squares);
    // Past the barrier every thread of the token has read its epoch and ended its waits.
    if (N > 1 && threadIdx.x == 0 && reduce.cta == 0) p.epochs[token] = mine.epoch + 1;
    if (last) release_stream();
    const float root = inverse_root(squares * p.inverse_hidden + p.eps);
#pragma unroll 1
    for (int v = 0; v < trips(); ++v) {
      const int at = vec(v);
      if (at >= p.vecs) break;
      float f[8], gain[8];
      unpack<T>(mine.get(v), f);
      if constexpr (kEager) {
#pragma unroll
        for (int j = 0; j < 8; ++j) gain[j] = early[j];
      } else {
        gains(at, gain);
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) f[j] = f[j] * root * gain[j];
      const uint4 norm = pack<T>(f);
      if constexpr (kQuant) mine.set(v, norm);
      if (p.norm_out != nullptr) static_cast<uint4*>(p.norm_out)[row * p.vecs + at] = norm;
    }
    if constexpr (kQuant) quantise(row, mine);
  }

  __device__ __forceinline__ float token_factor(int64_t row, const Token& norm) {
    float amax = 0.0f;
#pragma unroll 1
    for (int v = 0; v < trips() && vec(v) < p.vecs; ++v) {
      float f[8];
      unpack<T>(norm.get(v), f);
#pragma unroll
      for (int j = 0; j < 8; ++j) amax = Max::apply(amax, fabsf(f[j]));
    }
    amax = reduce.template operator()<Max>(amax);
    const float scale = Max::apply(__fdiv_rn(amax, kFp8Max), kTokenMinScale);
    if (threadIdx.x == 0 && reduce.cta == 0) static_cast<float*>(p.quant_scale)[row] = scale;
    return scale;
  }

  __device__ __forceinline__ void quantise(int64_t row, const Token& norm) {
    float factor = __fdiv_rn(1.0f, p.quant_arg);
    if (p.quant == kFp8Static && row == 0 && threadIdx.x == 0 && reduce.cta == 0)
      *static_cast<float*>(p.quant_scale) = p.quant_arg;
    if (p.quant == kFp8Token) factor = token_factor(row, norm);
#pragma unroll 1
    for (int v = 0; v < trips(); ++v) {
      const int at = vec(v);
      const bool active = at < p.vecs;
      float f[8];
      unpack<T>(active ? norm.get(v) : make_uint4(0, 0, 0, 0), f);
      if (p.quant >= kNvfp4Linear) {
        store_nvfp4(p, row, at, active, f);  // by all lanes: neighbours share a block
      } else if (active) {
#pragma unroll
        for (int j = 0; j < 8; ++j) f[j] = p.quant == kFp8Static ? __fmul_rn(f[j], factor) : __fdiv_rn(f[j], factor);
        store_fp8(p, row, at, f);
      }
    }
    if (p.quant == kNvfp4Swizzled && reduce.cta == 0) zero_scales(p, row, p.vecs / 2);
  }

  // Scale rows past the last token, up to the end of their tile.
  __device__ __forceinline__ void zero_tail_rows(int64_t first_token, int64_t step) {
    if (p.quant != kNvfp4Swizzled || reduce.cta != 0 || p.token_base + p.tokens != p.call_tokens) return;
    const int64_t end = (p.call_tokens + kTileRows - 1) / kTileRows * kTileRows;
    for (int64_t row = p.call_tokens + first_token; row < end; row += step) zero_scales(p, row, 0);
  }
};

template <typename T, int N, int C, bool kEager, bool kTwoShot, bool kQuant>
__device__ __forceinline__ void run_tail(const Params& p) {
  using Body = Tail<T, N, C, kEager, kTwoShot, kQuant>;
  extern __shared__ uint4 staged[];  // the pipe; unless kEager then tokens [1 or 2][vecs_per_thread][threads]
  __shared__ float scratch[2 * TokenReduce<C>::kWarps];
  const uint32_t cta = C > 1 ? cluster_rank() : 0u;
  if constexpr (C > 1) cluster_arrive();  // no block may write into another's memory before that one has started
  TokenReduce<C> reduce{scratch, cta};
  const int first = static_cast<int>(cta * blockDim.x + threadIdx.x), threads = blockDim.x;
  const int64_t step = gridDim.x / C, first_token = blockIdx.x / C;  // the launcher starts no block without a token
  typename Body::Pipe pipe{p, staged + threadIdx.x, first, step, first_token};
  Body tail{p, reduce, pipe, first};

  wait_for_stream();
  Routes routes = load_routes<T>(p, first_token);
  pipe.ask(routes, 0);
  float gain[8] = {};
  typename Body::Token ahead, mine;
  if constexpr (kEager) {
    if (first < p.vecs) tail.gains(first, gain);
  } else {
    mine.stage = staged + Body::Pipe::kVectors * threads + threadIdx.x;
    ahead.stage = N > 1 ? mine.stage + p.vecs_per_thread * threads : mine.stage;
  }
  // Each round contributes one token and finishes the one before it; without ranks, the same one.
  Routes next = load_routes<T>(p, first_token + step);
  int64_t pending = -1;  // contributed, not finished
  for (int64_t token = first_token;; token += step) {
    const bool more = token < p.tokens;
    float squares = 0.0f;
    if (more) {
      const Routes after = load_routes<T>(p, token + 2 * step);
      squares = tail.contribute(token, routes, next, ahead);
      routes = next;
      next = after;
    }
    if (C > 1 && pending < 0) cluster_wait();
    if constexpr (N == 1) {
      const bool last = token + step >= p.tokens;
      tail.finish(token, ahead, last, squares, gain);
      if (last) break;
    } else {
      if (pending >= 0) tail.finish(pending, mine, !more, squares, gain);
      if (!more) break;
      const typename Body::Token done = mine;
      mine = ahead;
      if constexpr (!kEager) ahead = done;
    }
    pending = token;
  }
  if constexpr (kQuant) tail.zero_tail_rows(first_token, step);
}

// Registers a thread: two blocks of 448 threads or four of 224, as H 7168 takes them, on a multiprocessor of 65,536. From
// four ranks on, the vectors of several peers are in flight together. A block that holds a token alone has up to 896
// threads, which leaves them 72: enough for one peer.
constexpr int registers(int ranks, bool quant = false) { return (ranks < 4 ? 72 : 96) + (quant ? 16 : 0); }

template <typename T, int N, int C, bool kQuant>
__global__ void __maxnreg__(C == 1 ? 72 : registers(N, kQuant)) cluster_tail(const __grid_constant__ Params p) {
  run_tail<T, N, C, true, false, kQuant>(p);
}

template <typename T, int N, bool kTwoShot, bool kQuant>
__global__ void __maxnreg__(registers(N)) block_tail(const __grid_constant__ Params p) {
  run_tail<T, N, 1, false, kTwoShot, kQuant>(p);
}

}  // namespace moe_tail
