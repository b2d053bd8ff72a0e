"""SCALE: the routed scaling factor."""

from __future__ import annotations

from moe_conformance.cases.tail_data import TailInputs
from moe_conformance.marks import clause, layers, pairs, several_ranks, tails
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.subjects.pair import PairSubject
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.suite.deferral import deferred, judge_rows
from moe_conformance.verdicts import ClauseBrokenError
from moe_contract import Violation

SCALED = 2.5
"""DeepSeek-V3's factor; applied twice it is 6.25, left out 1."""


@clause("SCALE-1")
@tails({"scale": SCALED}, {"scale": 2.827, "stratum": "normal"}, {"scale": 5.0, "absent": "quarter"})
def test_consumer_applies_the_scale_once(tail: TailSubject) -> None:
    """A scale that is left to the finalizer is applied once."""
    tail.judge_residual(tail.run())


@clause("SCALE-1")
@tails({"scale": SCALED, "form": "finalized"})
def test_consumer_scales_a_finalized_tensor_too(tail: TailSubject) -> None:
    """The scale belongs to the output, whichever form its routed part has."""
    tail.judge_residual(tail.run())


@clause("SCALE-1")
@pairs(
    {"method": "deepseek-v3", "scale": SCALED, "intermediate_size": 32, "shared_intermediate_size": 32},
    {"method": "renormalize", "scale": SCALED},
    where=several_ranks,
)
def test_scale_is_applied_once_over_producer_and_consumer(pair: PairSubject) -> None:
    """Folded into the weights, or applied by the consumer: once in all, whichever the declaration says."""
    pair.require_support()
    pair.layer.require_support(deferral=True)
    inputs = pair.hand_over()
    _require_stated_once(pair, inputs)
    judge_rows(pair.layer, [output.routed for output in inputs.outputs])
    pair.tail.judge(pair.tail.run(inputs), inputs)


def _require_stated_once(pair: PairSubject, inputs: TailInputs) -> None:
    """What the producer did not fold, and no more, is stated to the finalizer."""
    folded = pair.layer.declaration.folds(pair.case.method)
    expected = 1.0 if folded else pair.case.scale
    for rank, output in enumerate(inputs.outputs):
        if output.routed_scaling_factor != expected:
            what = "folded into the weights" if folded else "not folded into the weights"
            found = Violation(
                clause="SCALE-1",
                field="routed_scaling_factor",
                got=str(output.routed_scaling_factor),
                expected=f"{expected}: the factor {pair.case.scale} is {what}",
                rank=rank,
            )
            raise ClauseBrokenError([found])


@clause("SCALE-2")
@tails({"scale": SCALED, "shared": True}, {"scale": 1.5, "shared": True, "form": "finalized"})
def test_scale_multiplies_the_routed_part_only(tail: TailSubject) -> None:
    """The scale touches neither the shared output nor the residual."""
    tail.judge_residual(tail.run())


@clause("SCALE-3")
@layers(
    *({"method": method, "scale": SCALED} for method in ("default", "renormalize", "renormalize-naive", "topk")),
    *({"method": method, "scale": SCALED} for method in ("sigmoid-renorm", "sigmoid", "topk-sigmoid")),
    {"method": "minimax2", "scale": SCALED},
    {"method": "deepseek-v3", "scale": SCALED},
    {"method": "precomputed", "scale": SCALED},
    where=several_ranks,
)
def test_folding_is_as_declared_for_each_method(layer: LayerSubject) -> None:
    """The weights contain the scale for exactly the routing methods that the declaration names."""
    judge_rows(layer, deferred(layer))
