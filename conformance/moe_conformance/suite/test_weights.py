"""WGT: the routing weights."""

from __future__ import annotations

from dataclasses import replace

import torch

from moe_conformance.cases.tail_data import TailInputs, with_routed
from moe_conformance.marks import clause, layers, pairs, several_ranks, tails
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.subjects.pair import PairSubject
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.suite.deferral import deferred, judge_rows
from moe_conformance.suite.refusals import require_refused
from moe_conformance.verdicts import UnsupportedCaseError


@clause("WGT-1")
@layers(where=several_ranks)
def test_weights_stand_slot_for_slot_with_the_map(layer: LayerSubject) -> None:
    """Weights are [T, K], contiguous, and each belongs to the expert whose row the map names in its slot."""
    judge_rows(layer, deferred(layer))


@clause("WGT-1")
@tails({"stratum": "normal"}, where=lambda case: case.tokens > 1 and case.top_k > 1)
def test_each_slot_gets_its_own_weight(tail: TailSubject) -> None:
    """A consumer multiplies each row with the weight of the same slot."""
    tail.judge(tail.run())


@clause("WGT-2")
@layers({}, {"method": "deepseek-v3", "scale": 2.5}, where=several_ranks)
def test_weights_have_the_declared_dtype(layer: LayerSubject) -> None:
    """The weights' dtype is the one that the producer declares."""
    layer.require_contract(deferred(layer))


@clause("WGT-2")
@tails({"weights_dtype": "float32"}, {"weights_dtype": "float32", "stratum": "normal"})
def test_float32_weights_are_read_as_float32(tail: TailSubject) -> None:
    """A consumer that declares float32 weights uses all of their bits."""
    tail.judge(tail.run())


@clause("WGT-2")
@tails({})
def test_undeclared_float32_weights_are_refused(tail: TailSubject) -> None:
    """A consumer that declares weights in the activation dtype refuses float32 ones instead of reading their halves."""
    if "float32" in tail.declaration.weights_dtypes:
        raise UnsupportedCaseError(f"{tail.name} declares float32 weights, so it has none of them to refuse")
    require_refused(tail, _with_weights_in(tail, torch.float32), "float32 weights")


@clause("WGT-2")
@tails({})
def test_weights_of_the_other_16_bit_type_are_refused(tail: TailSubject) -> None:
    """bfloat16 weights beside float16 rows, or the reverse, are refused: both are two bytes wide."""
    other = torch.float16 if tail.case.dtype == "bfloat16" else torch.bfloat16
    require_refused(tail, _with_weights_in(tail, other), f"{str(other).removeprefix('torch.')} weights")


@clause("WGT-3")
@layers(
    *({"method": method} for method in ("default", "renormalize", "renormalize-naive", "topk")),
    *({"method": method} for method in ("sigmoid-renorm", "sigmoid", "topk-sigmoid", "minimax2")),
    {"method": "deepseek-v3"},
    {"method": "deepseek-v3", "num_experts": 64, "num_groups": 8, "topk_groups": 4},
    {"method": "renormalize", "router_dtype": "activation"},
    {"method": "precomputed"},
    {"method": "precomputed", "precomputed_weights": "float32"},
    where=lambda case: case.ranks > 1 and case.num_experts // case.num_groups * case.topk_groups >= case.top_k,
)
def test_weights_decode_to_the_routing_weights(layer: LayerSubject) -> None:
    """The values, not only the tag: every routing method's weights are within the bound of a float32 router."""
    judge_rows(layer, deferred(layer))


@clause("WGT-4")
@tails({"stratum": "normal"})
def test_consumer_applies_the_weight_once(tail: TailSubject) -> None:
    """The routing weight multiplies its row once in the consumer."""
    tail.judge_residual(tail.run())


@clause("WGT-4")
@pairs({"method": "default"}, where=several_ranks)
def test_weight_is_applied_once_over_producer_and_consumer(pair: PairSubject) -> None:
    """Producer and consumer together multiply each row with its weight once."""
    pair.require_support()
    pair.layer.require_support(deferral=True)
    inputs = pair.hand_over()
    judge_rows(pair.layer, [output.routed for output in inputs.outputs])
    pair.tail.judge(pair.tail.run(inputs), inputs)


def _with_weights_in(tail: TailSubject, dtype: torch.dtype) -> TailInputs:
    """The case's inputs with the same weights in another dtype."""
    return with_routed(tail.inputs, lambda routed: replace(routed, expert_weights=routed.expert_weights.to(dtype)))
