"""RED: the reduction over ranks, the residual, and what ranks do to one another."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from moe_conformance.cases.tail_data import TailInputs, make_tail_inputs
from moe_conformance.harness.threads import HungRanksError, ThreadRankGroup, run_ranks
from moe_conformance.marks import clause, several_ranks, tails
from moe_conformance.subjects.calls import first_line, judged_errors, on_every_rank
from moe_conformance.subjects.tail import TailSubject, fresh_copy
from moe_conformance.suite.comparisons import blamed_on, require_same
from moe_conformance.verdicts import ClauseBrokenError, UnsupportedCaseError
from moe_contract import MoEOutput, PeerTimeoutError, TailOutput, Violation
from moe_contract.outputs import require_unfinalized

PEER_TIMEOUT_S = 0.3
"""How long a rank waits for a peer that never comes; a hundred times what the slowest collective here takes."""
HANG_S = 10.0
"""When a wait that should have ended after PEER_TIMEOUT_S is called a hang: 30 times as long."""
DELAY_S = 0.005
"""How much later one rank starts a call; long beside a call of a small case."""
LARGE = 2.0**13
"""Within float16, and its reciprocal too; the product of both sizes' ratio, 2^26, is more than float32's 2^24."""
LADDER = (1, 4, 2, 7, 3, 1)
"""Numbers of tokens of calls back to back: up, down, and back to the smallest."""


@clause("RED-1")
@tails({}, {"shared": True, "absent": "quarter"}, {"form": "finalized"}, where=several_ranks)
def test_every_ranks_part_is_summed_once(tail: TailSubject) -> None:
    """Ranks with different data are summed: none missing, none twice, none in place of another."""
    tail.judge_residual(tail.run())


@clause("RED-2")
@tails(
    {"stratum": "normal", "shared": True, "norm_weight": "random"},
    {"stratum": "cancelling"},
    {"stratum": "dominant"},
    where=several_ranks,
)
def test_every_rank_ends_with_the_same_bits(tail: TailSubject) -> None:
    """Residual and norm are the same bits on every rank."""
    outputs = tail.run()
    for rank, output in enumerate(outputs):
        require_same(outputs[0].residual_out, output.residual_out, "RED-2", "residual_out", "the rank", rank)
        require_same(outputs[0].norm_out, output.norm_out, "RED-2", "norm_out", "the rank", rank)


@clause("RED-2")
@tails({"stratum": "normal", "shared": True}, where=several_ranks)
def test_ranks_are_added_in_the_same_order_everywhere(tail: TailSubject) -> None:
    """One rank's part is so large that the order of additions shows in every bit of the others', once the residual
    has taken it back: whatever the order is, it is the same on every rank."""
    outputs = tail.run(_with_large_rank(tail.inputs))
    for rank, output in enumerate(outputs):
        require_same(outputs[0].residual_out, output.residual_out, "RED-2", "residual_out", "the rank", rank)


@clause("RED-3")
@tails({}, {"absent": "all"})
def test_residual_is_added_once(tail: TailSubject) -> None:
    """The residual, which is the same on every rank, is in the result once."""
    tail.judge_residual(tail.run())


@clause("RED-4")
@tails({"absent": "quarter"}, where=several_ranks)
def test_ranks_issue_the_same_collectives_whatever_their_data(tail: TailSubject) -> None:
    """A rank with nothing but -1 slots or zeros takes part in the same collectives as the others."""
    tail.require_support()
    inputs = _with_odd_rank(tail.inputs)
    capacity = inputs.capacity(tail.case)

    def one_rank(group: ThreadRankGroup) -> list[str]:
        own = fresh_copy(inputs, group.rank, tail.settings.device)
        opened = tail.consumer.open(group, capacity)
        opened(own.outputs[0], own.residual, own.norm_weight, eps=own.eps)
        opened.close()
        return group.trace

    traces = on_every_rank(tail.name, tail.settings, tail.case.ranks, one_rank)
    for rank, trace in enumerate(traces):
        if trace != traces[0]:
            expected = f"as rank 0: {traces[0]}"
            raise ClauseBrokenError(
                [Violation(clause="RED-4", field="collectives", got=str(trace), expected=expected, rank=rank)]
            )


@clause("RED-5")
@tails({"stratum": "lattice"}, {"stratum": "normal", "absent": "quarter"})
def test_calls_back_to_back_with_other_sizes_stay_right(tail: TailSubject) -> None:
    """Calls with T going up and down, in one opened tail, are each judged on their own."""
    calls = _ladder(tail)
    judge_calls(tail, calls, tail.run_calls(calls))


@clause("RED-5")
@tails({"stratum": "lattice"}, where=several_ranks)
def test_a_delayed_rank_neither_misses_nor_reads_another_call(tail: TailSubject) -> None:
    """One rank starts each call late, another one every time, and every call stays right on every rank."""
    calls = _ladder(tail)

    def before(rank: int, call: int) -> None:
        if rank == call % tail.case.ranks:
            time.sleep(DELAY_S)

    judge_calls(tail, calls, tail.run_calls(calls, before))


@clause("RED-5")
@tails({"stratum": "lattice"})
def test_a_call_after_one_without_tokens_stays_right(tail: TailSubject) -> None:
    """A call of no tokens between two others, in one opened tail, leaves nothing behind."""
    tail.require_support()
    if not tail.declaration.accepts_finalized:
        raise UnsupportedCaseError(f"{tail.name} takes no finalized tensor, which is the only form of an empty batch")
    empty = make_tail_inputs(tail.case.model_copy(update={"tokens": 0, "form": "finalized"}))
    calls = [tail.inputs, empty, make_tail_inputs(tail.case.model_copy(update={"seed": tail.case.seed + 1}))]
    judge_calls(tail, calls, tail.run_calls(calls))


@clause("RED-6")
@tails(where=several_ranks)
def test_a_peer_that_never_arrives_is_diagnosed(tail: TailSubject) -> None:
    """With one rank never started the others raise an error within the group's time limit."""
    tail.require_support()
    inputs = tail.inputs
    capacity = inputs.capacity(tail.case)
    missing = tail.case.ranks - 1

    def one_rank(group: ThreadRankGroup) -> None:
        opened = tail.consumer.open(group, capacity)
        own = fresh_copy(inputs, group.rank, tail.settings.device)
        opened(own.outputs[0], own.residual, own.norm_weight, eps=own.eps)

    with judged_errors(tail.name):
        got = _outcome_without(missing, tail, one_rank)
    if got:
        expected = f"PeerTimeoutError that names rank {missing}, after {PEER_TIMEOUT_S} s"
        raise ClauseBrokenError([Violation(clause="RED-6", field="wait", got=got, expected=expected)])


def _outcome_without(missing: int, tail: TailSubject, one_rank: Callable[[ThreadRankGroup], None]) -> str:
    """What came instead of a diagnosis when one rank is never started; empty where it was diagnosed."""
    try:
        run_ranks(
            one_rank,
            tail.case.ranks,
            device=tail.settings.device,
            timeout_s=HANG_S,
            peer_timeout_s=PEER_TIMEOUT_S,
            absent=frozenset({missing}),
        )
    except PeerTimeoutError as error:
        return "" if str(missing) in str(error) else f"an error that does not name rank {missing}: {first_line(error)}"
    except HungRanksError as error:
        return f"a hang: {first_line(error)}"
    return "a result without the missing rank"


def _with_large_rank(inputs: TailInputs) -> TailInputs:
    """LARGE is the last rank's shared output, all else of a rank is below half a unit of it in float32."""
    outputs = []
    for rank, output in enumerate(inputs.outputs):
        assert output.shared_output is not None
        value = LARGE if rank == len(inputs.outputs) - 1 else 0.0
        shared = torch.full_like(output.shared_output, value)
        outputs.append(replace(output, shared_output=shared, routed_scaling_factor=1.0 / LARGE))
    return replace(inputs.with_outputs(outputs), residual=torch.full_like(inputs.residual, -LARGE))


def _with_odd_rank(inputs: TailInputs) -> TailInputs:
    """Rank 0 has only -1 slots; the last rank's rows are zero."""
    outputs = list(inputs.outputs)
    outputs[0] = _changed(outputs[0], index=-1)
    outputs[-1] = _changed(outputs[-1], rows=0.0)
    return inputs.with_outputs(outputs)


def _changed(output: MoEOutput, *, index: int | None = None, rows: float | None = None) -> MoEOutput:
    routed = require_unfinalized(output)
    if index is not None:
        filled = torch.full_like(routed.expanded_idx_to_permuted_idx, index)
        routed = replace(routed, expanded_idx_to_permuted_idx=filled)
    if rows is not None:
        routed = replace(routed, gemm2_permuted=torch.full_like(routed.gemm2_permuted, rows))
    return replace(output, routed=routed)


def judge_calls(tail: TailSubject, calls: list[TailInputs], results: list[list[TailOutput]]) -> None:
    """Judges calls back to back. One that is wrong there and right alone is wrong by what came before it."""
    for number, (inputs, outputs) in enumerate(zip(calls, results, strict=True)):
        try:
            tail.judge_residual(outputs, inputs, controls=False)
        except ClauseBrokenError as error:
            tail.judge_residual(tail.run(inputs), inputs, controls=False)
            why = f"call {number} of {len(calls)} is wrong, and right when it is the only one"
            raise blamed_on(error, "RED-5", why) from error


def _ladder(tail: TailSubject) -> list[TailInputs]:
    cases = [tail.case.model_copy(update={"tokens": tokens, "seed": n}) for n, tokens in enumerate(LADDER)]
    return [make_tail_inputs(case) for case in cases]
