"""The exchange protocol on a GPU: re-arming, delays, graphs, lost peers (RED-5, RED-6, GRAPH-1)."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from moe_backends.cuda import CudaConsumer, Form
from moe_contract import PeerTimeoutError, TailCapacity, TailOutput

from .cuda_ranks import Call, Ranks, capture, random_call, same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

MIXED = (Form(max_tokens=4, blocks=4), Form(max_tokens=20, vectors=4, two_shot=True), Form(vectors=4))
"""Cluster one-shot, block two-shot and block one-shot, so that calls of other sizes take other forms."""
HIDDEN, TOP_K, MOST = 1024, 4, 48
SIZES = (1, 48, 3, 20, 5, 21, 2, 33, 4, 1, 17, 40)


def ladder(ranks: int) -> list[Call]:
    """Calls with T up and down."""
    return [random_call(n, ranks, tokens, HIDDEN, TOP_K) for n, tokens in enumerate(SIZES)]


def opened(ranks: int, **options: object) -> Ranks:
    """Tails for the ladder's calls."""
    forms = MIXED if ranks > 1 else tuple(form for form in MIXED if not form.two_shot)
    forms = (forms[0], Form(max_tokens=10, blocks=1), *forms[1:])
    consumer = CudaConsumer(forms=forms, timeout_s=5.0, **options)  # type: ignore[arg-type]
    return Ranks(consumer, ranks, TailCapacity(MOST, HIDDEN, TOP_K, torch.bfloat16))


def require_right(found: list[TailOutput], want: torch.Tensor) -> None:
    """Every rank has the emulation's residual."""
    for output in found:
        assert same_bits(output.residual_out, want)


def test_a_thousand_repeats_have_the_same_bits() -> None:
    """NUM-2: run to run and rank to rank, with another rank first each time."""
    call = random_call(1, 4, 40, 7168, 8)
    tails = Ranks(CudaConsumer(timeout_s=5.0), 4, TailCapacity(40, 7168, 8, torch.bfloat16))
    first = tails(call)
    for n in range(1000):
        again = tails(call, [(n + r) % 4 for r in range(4)])
        for a, b in zip(first, again, strict=True):
            assert same_bits(a.residual_out, b.residual_out) and same_bits(a.norm_out, b.norm_out)
    tails.close()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_sizes_up_and_down_in_any_mix_of_forms(ranks: int) -> None:
    """RED-5: 600 calls in random order of sizes and of ranks, none waited for in between."""
    calls, tails, rng = ladder(ranks), opened(ranks), random.Random(ranks)
    wants = [call.expected()[0] for call in calls]
    found = []
    for _ in range(600):
        pick = rng.randrange(len(calls))
        order = rng.sample(range(ranks), ranks)
        found.append((pick, tails(calls[pick], order)))
    torch.cuda.synchronize()
    for pick, outputs in found:
        require_right(outputs, wants[pick])
    tails.close()


def replays(tails: Ranks, calls: list[Call], rounds: int, stall: bool) -> None:
    """Graphs of single calls, replayed in random order, each judged; with ``stall`` one rank is held up in each."""
    rng, ranks = random.Random(7), len(tails.tails)
    kept: list[list[TailOutput]] = []
    graphs = []
    for call in calls:
        graphs.append(capture(lambda call=call: kept.append(tails(call))))  # type: ignore[misc]
    results = kept[1::2]  # of each pair the warm-up comes first
    wants = [call.expected()[0] for call in calls]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(rounds):
        pick = rng.randrange(len(calls))
        if stall:
            late, point = rng.randrange(ranks), rng.randrange(3)
            delay = round(10 ** rng.uniform(3, 7 if rng.random() < 0.01 else 5))  # 1 us to 100 us, at times 10 ms
            for rank, tail in enumerate(tails.tails):
                values = torch.zeros(3, dtype=torch.int64)
                values[point] = delay if rank == late else 0
                tail.engine.workspace.stall.copy_(values)  # type: ignore[union-attr]
        graphs[pick].replay()
        for output in results[pick]:
            wrong += (output.residual_out.view(torch.int16) != wants[pick].view(torch.int16)).sum()
            output.residual_out.zero_()
    assert int(wrong) == 0
    for tail in tails.tails:
        tail.check()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_graph_replays_of_changing_sizes_stay_right(ranks: int) -> None:
    """GRAPH-1, RED-5: one graph a size, replayed 1,000 times in random order."""
    tails = opened(ranks)
    replays(tails, ladder(ranks), 1000, stall=False)
    tails.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_stalled_inside_the_kernel_harms_nothing(ranks: int) -> None:
    """RED-5: a rank held up before its push, between push and poll, or after its poll, for 1 us to 10 ms."""
    tails = opened(ranks, test_hooks=True)
    replays(tails, ladder(ranks), 1500, stall=True)
    tails.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_run_free_inside_a_graph(ranks: int) -> None:
    """Each rank's calls follow one another without meeting the others': a rank may be two calls ahead."""
    calls, tails = ladder(ranks), opened(ranks, pdl=True)
    wants = [call.expected()[0] for call in calls]
    kept: list[list[list[TailOutput]]] = []

    def chain() -> None:
        current = torch.cuda.current_stream()
        by_rank = []
        for rank, tail in enumerate(tails.tails):
            stream = tails.streams[rank]
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                by_rank.append([tail(c.outputs[rank], c.residual, c.norm_weight, eps=c.eps) for c in calls * 4])
        for stream in tails.streams:
            current.wait_stream(stream)
        kept.append(by_rank)

    graph = capture(chain)
    for _ in range(30):
        graph.replay()
    torch.cuda.synchronize()
    for outputs in kept[-1]:
        for output, want in zip(outputs, wants * 4, strict=True):
            assert same_bits(output.residual_out, want)
    tails.close()


def test_the_stall_that_the_tests_rely_on_takes_its_time() -> None:
    """20 ms in one rank hold up the other: otherwise the stalled replays above would say nothing."""
    tails, call = opened(2, test_hooks=True), ladder(2)[0]
    tails(call)
    tails.tails[1].engine.workspace.stall.fill_(20_000_000)  # type: ignore[union-attr]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    tails(call)
    end.record()
    torch.cuda.synchronize()
    assert begin.elapsed_time(end) >= 60.0
    tails.close()


def test_two_tails_on_their_own_streams_do_not_meet() -> None:
    """Each has its share of the GPU and its own slots."""
    first, second = (opened(2, concurrent_tails=2) for _ in range(2))
    calls = ladder(2)
    wants = [call.expected()[0] for call in calls]
    found = []
    for n in range(200):
        pick = n % len(calls)
        found += [(pick, first(calls[pick])), (pick, second(calls[pick]))]
    torch.cuda.synchronize()
    for pick, outputs in found:
        require_right(outputs, wants[pick])
    first.close()
    second.close()


def test_a_rank_that_never_launches_is_named() -> None:
    """RED-6: the wait ends, the next call, check and close say who was missing and where; outputs are NaN."""
    call = random_call(2, 2, 5, HIDDEN, TOP_K)
    tails = Ranks(CudaConsumer(timeout_s=0.2), 2, TailCapacity(5, HIDDEN, TOP_K, torch.bfloat16))
    output = tails.tails[0](call.outputs[0], call.residual, call.norm_weight, eps=call.eps)
    with pytest.raises(PeerTimeoutError, match="rank 0 waited in vain for rank 1 at token"):
        tails.tails[0].check()
    assert bool(output.residual_out.isnan().all())
    with pytest.raises(PeerTimeoutError, match="close the tail"):
        tails.tails[0](call.outputs[0], call.residual, call.norm_weight, eps=call.eps)
    tails.tails[1].close()
    with pytest.raises(PeerTimeoutError):
        tails.tails[0].close()


def test_inputs_are_not_written() -> None:
    """OUT-4."""
    call = random_call(3, 2, 20, HIDDEN, TOP_K)
    before = [call.residual.clone(), call.norm_weight.clone(), *(o.shared_output.clone() for o in call.outputs)]  # type: ignore[union-attr]
    tails = opened(2)
    tails(call)
    tails.close()
    after = [call.residual, call.norm_weight, *(o.shared_output for o in call.outputs)]
    assert all(same_bits(a, b) for a, b in zip(before, after, strict=True))  # type: ignore[arg-type]
    assert all(a is not b for a, b in pairwise(after))
