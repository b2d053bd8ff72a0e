"""CAP: declared limits and devices."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_conformance.harness.threads import ThreadRankGroup
from moe_conformance.marks import any_tokens, clause, layers, several_ranks, tails
from moe_conformance.subjects.calls import on_every_rank
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.suite.limits import producer_limits, tail_limits
from moe_conformance.suite.refusals import REFUSALS, refusal
from moe_conformance.verdicts import ClauseBrokenError, UnderClaimedError, UnsupportedCaseError
from moe_contract import TailOutput, Violation

RESULT = "a result on the meta device"


@clause("CAP-1")
@tails(where=any_tokens)
def test_tail_works_at_its_limits_and_refuses_beyond(tail: TailSubject) -> None:
    """At each declared limit the result is right; one past it the call is refused, never wrong."""
    tail.require_support()
    limits = tail_limits(tail.declaration, tail.case)
    if not limits:
        raise UnsupportedCaseError(f"{tail.name} declares no limit that a case of this machine could pass")
    for limit in limits:
        if limit.inside is not None:
            inside = replace(tail, case=limit.inside)
            inside.judge(inside.run())
        beyond = replace(tail, case=limit.outside)
        results: list[list[TailOutput]] = []
        if refusal(lambda beyond=beyond, results=results: results.append(beyond.run_unchecked())) is None:  # type: ignore[misc]  # mypy has no type for a lambda's defaults
            beyond.judge(results[0])
            raise UnderClaimedError(f"{tail.name} is right beyond its declared {limit.name}: {limit.outside.id}")


@clause("CAP-1")
@tails(where=any_tokens)
def test_call_at_capacity_works(tail: TailSubject) -> None:
    """A tail opened for exactly this call's sizes runs it."""
    tail.judge(tail.run())


@clause("CAP-1")
@layers()
def test_producer_refuses_beyond_its_limits(layer: LayerSubject) -> None:
    """What a producer's declaration excludes is refused, never wrong."""
    layer.require_support()
    limits = producer_limits(layer.declaration, layer.case)
    if not limits:
        raise UnsupportedCaseError(f"{layer.name} declares no limit that a case of this machine could pass")
    for name, case in limits:
        beyond = replace(layer, case=case)
        if refusal(beyond.run_unchecked) is None:
            expected = "a refusal (UnsupportedError, ValueError or TypeError with a message)"
            got = f"a result beyond its declared {name}: {case.id}"
            raise ClauseBrokenError([Violation(clause="CAP-1", field="load", got=got, expected=expected)])


@clause("CAP-2")
@tails(where=any_tokens)
def test_tail_says_that_it_cannot_run_on_a_device(tail: TailSubject) -> None:
    """Tensors on a device that no consumer declares (torch's meta device) are refused with the reason."""
    tail.require_support()
    inputs = tail.inputs.to(torch.device("meta"))
    capacity = inputs.capacity(tail.case)

    def one_rank(group: ThreadRankGroup) -> str:
        """What came in place of a refusal with a reason; empty where that came."""
        group.device = torch.device("meta")
        try:
            opened = tail.consumer.open(group, capacity)
            opened(inputs.outputs[group.rank], inputs.residual, inputs.norm_weight, eps=inputs.eps)
        except REFUSALS as error:
            return "" if str(error).strip() else f"{type(error).__name__} without a message"
        return RESULT

    for rank, got in enumerate(on_every_rank(tail.name, tail.settings, tail.case.ranks, one_rank)):
        if got:
            raise ClauseBrokenError([_no_reason(got, rank)])


@clause("CAP-2")
@layers(where=several_ranks)
def test_producer_says_that_it_cannot_run_on_a_device(layer: LayerSubject) -> None:
    """A layer on a device that no producer declares (torch's meta device) is refused with the reason."""
    layer.require_support()
    elsewhere = replace(layer, settings=replace(layer.settings, device="meta"))
    if refusal(elsewhere.run_unchecked) is None:
        raise ClauseBrokenError([_no_reason(RESULT)])


def _no_reason(got: str, rank: int | None = None) -> Violation:
    expected = "a refusal that says why this device cannot run it"
    return Violation(clause="CAP-2", field="device", got=got, expected=expected, rank=rank)
