// Many tokens: a block takes whole tokens, `gridDim` apart, whose rows flow through shared memory. With ranks, a token's
// contribution is pushed before the previous token's is waited for, so that the trip to the peers hides behind the next
// token's loads.
#pragma once

#include "outputs.cuh"
#include "peers.cuh"
#include "pipe.cuh"

namespace moe_tail {

template <typename T, int N, bool kTwoShot, bool kQuant>
struct LoopedTail {
  using Pipe = RowPipe<T, N == 1>;
  struct Token {
    Column<Looped> column;
    uint32_t epoch;
  };

  const Params& p;
  Outputs<T, Looped, kQuant>& out;
  Pipe& pipe;
  using Exchange = Peers<T, N, kTwoShot, 8>;
  Exchange peers{p};

  // Local sum of a token and its push. `routes`, `next` are this token's and those of this block's next one. Without
  // ranks also the residual, since nothing has to be waited for: returns this thread's sum of squares of it.
  __device__ __forceinline__ float contribute(uint32_t token, const Routes& routes, const Routes& next, Token& mine) {
    float squares = 0.0f;
    if constexpr (N > 1) mine.epoch = p.epochs[token];
#pragma unroll 1
    for (int v = 0; v < out.trips(); ++v) {
      const int at = out.vec(v);
      const bool active = at < p.vecs;
      uint4 residual = make_uint4(0, 0, 0, 0);
      uint4 own = pipe.sum(token, routes, next, active, residual);
      if constexpr (N == 1) {
        float total[8];
        unpack<T>(own, total);
        own = with_residual<T>(total, residual);
        if (active) squares += out.keep(p.token_base + token, at, own);
      } else {
        if (v == 0) test_stall(p, 0);
        if (active) peers.push(token, mine.epoch, at, own);
      }
      mine.column.set(v, own);
    }
    if constexpr (N > 1) test_stall(p, 1);
    return squares;
  }

  // Receives a whole token, one vector ahead where registers allow; returns this thread's sum of squares.
  __device__ __forceinline__ float receive_all(uint32_t token, Token& mine) const {
    constexpr bool kAhead = N <= 4;
    float squares = 0.0f;
    typename Exchange::Incoming in = peers.ask(token, mine.epoch, out.vec(0)), next = {};
#pragma unroll 1
    for (int v = 0; v < out.trips(); ++v) {
      const int at = out.vec(v);
      if (at >= p.vecs) break;
      if constexpr (kAhead) next = peers.ask(token, mine.epoch, out.vec(v + 1));
      const uint4 x = peers.receive(token, mine.epoch, at, mine.column.get(v), in);
      mine.column.set(v, x);
      squares += out.keep(p.token_base + token, at, x);
      in = kAhead ? next : peers.ask(token, mine.epoch, out.vec(v + 1));
    }
    test_stall(p, 2);
    return squares;
  }

  // Waits for the ranks, then residual, norm and quantised outputs of a token. `squares` comes from contribute.
  __device__ __forceinline__ void finish(uint32_t token, Token& mine, bool last, float squares) {
    const uint32_t row = p.token_base + token;
    if constexpr (N > 1) squares = receive_all(token, mine);
    squares = out.reduce.template operator()<Sum>(squares);
    // Past the barrier every thread of the token has read its epoch and ended its waits.
    if (N > 1 && threadIdx.x == 0) p.epochs[token] = mine.epoch + 1;
    if (last) release_stream();
    const float root = out.root(squares);
#pragma unroll 1
    for (int v = 0; v < out.trips(); ++v) {
      if (out.vec(v) >= p.vecs) break;
      out.normalise(row, v, root, out.load_gain(out.vec(v)), mine.column);
    }
    if constexpr (kQuant) out.quantise(row, mine.column);
  }
};

template <typename T, int N, bool kTwoShot, bool kQuant>
__device__ __forceinline__ void run_looped(const Params& p) {
  using Body = LoopedTail<T, N, kTwoShot, kQuant>;
  using Pipe = typename Body::Pipe;
  // The pipe, then the columns of one token or, with peers, two. Aligned as lines of memory are: a copy that straddles
  // two lines of shared memory takes two.
  extern __shared__ __align__(128) uint4 staged[];
  __shared__ TokenReduce<1>::Scratch scratch;
  TokenReduce<1> reduce{scratch, 0u};
  const int first = static_cast<int>(threadIdx.x), threads = blockDim.x;
  const uint32_t step = gridDim.x, first_token = blockIdx.x;  // the launcher starts no block without a token
  Pipe pipe{p, shared_address(staged + first), first, step, first_token};
  Outputs<T, Looped, kQuant> out{p, reduce, first};
  Body tail{p, out, pipe};

  wait_for_stream();
  Routes routes = load_routes<T>(p, first_token);
  pipe.ask(routes.row, 0);
  typename Body::Token ahead, mine;
  mine.column.stage = staged + Pipe::kVectors * threads + first;
  ahead.column.stage = N > 1 ? mine.column.stage + p.vecs_per_thread * threads : mine.column.stage;
  Routes next = load_routes<T>(p, first_token + step);
  bool pending = false;  // the token before was contributed, not finished
  // Each round contributes one token and finishes the one before it; without ranks, the same one.
  for (uint32_t token = first_token;; token += step) {
    const bool more = token < p.tokens;
    float squares = 0.0f;
    if (more) {
      const Routes after = load_routes<T>(p, token + 2 * step);
      squares = tail.contribute(token, routes, next, ahead);
      routes = next;
      next = after;
    }
    if constexpr (N == 1) {
      const bool last = token + step >= p.tokens;
      tail.finish(token, ahead, last, squares);
      if (last) break;
    } else {
      if (pending) tail.finish(token - step, mine, !more, squares);
      if (!more) break;
      const typename Body::Token done = mine;
      mine = ahead;
      ahead = done;
      pending = true;
    }
  }
  if constexpr (kQuant) out.zero_tail_rows(first_token, step);
}

}  // namespace moe_tail
