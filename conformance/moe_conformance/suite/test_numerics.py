"""NUM: the rounding profile and determinism."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.harness.threads import ThreadRankGroup
from moe_conformance.marks import clause, layers, pairs, several_ranks, several_tokens, tails
from moe_conformance.subjects.calls import on_every_rank
from moe_conformance.subjects.layer import LayerSubject, RoutedOutput, of_tokens, on_device
from moe_conformance.subjects.pair import PairSubject
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.suite.comparisons import require_identical, require_same
from moe_conformance.suite.deferral import deferred, judge_rows
from moe_conformance.verdicts import UnsupportedCaseError
from moe_contract import Determinism, is_unfinalized

EVERYTHING = {"shared": True, "scale": 2.5, "absent": "quarter", "norm_weight": "random"}
MANY_SLOTS = {"tokens": 129, "top_k": 8, "hidden_size": 256}
"""More than a thousand slots, and one token more than a power of two: for what is wrong in few places only."""
REPEATS = 3
"""Runs of the same inputs that must agree."""


@clause("NUM-1")
@tails(
    EVERYTHING,
    {**EVERYTHING, "stratum": "normal"},
    {**EVERYTHING, "stratum": "small", "scale": 2.827, "weight_bias": 1.0},
    breadth="wide",
)
def test_tail_is_within_the_bound_of_its_profile(tail: TailSubject) -> None:
    """Every element of residual and norm is within the bound derived for the declared profile."""
    tail.judge(tail.run())


@clause("NUM-1")
@tails(MANY_SLOTS)
def test_tail_of_many_slots_is_right(tail: TailSubject) -> None:
    """What is wrong once in a thousand slots, or for the last token alone, is wrong here."""
    tail.judge(tail.run())


@clause("NUM-1")
@tails(
    {"stratum": "cancelling"},
    {"stratum": "cancelling", "shared": True, "scale": 2.5},
    {"stratum": "dominant"},
    {"stratum": "dominant", "shared": True},
    {"stratum": "normal", "weights_dtype": "float32"},
    # With more ranks, the worst-case bound of profiles that round at each rank is wider than one rank's expert.
    where=lambda case: case.ranks <= 4,
)
def test_tail_is_within_the_bound_where_rounding_shows(tail: TailSubject) -> None:
    """Terms that cancel, and terms below half a unit of the largest, tell apart where a consumer rounds."""
    tail.judge(tail.run())


@clause("NUM-1")
@layers(
    {"method": "deepseek-v3", "activation": "gelu-tanh"},
    {"method": "deepseek-v3"},  # silu too: many kernels have no other
    breadth="wide",
    where=several_ranks,
)
def test_rows_are_within_the_bound_of_a_float32_kernel(layer: LayerSubject) -> None:
    """Every element of every row, and every weight, is within its derived bound."""
    judge_rows(layer, deferred(layer))


@clause("NUM-1")
@layers(where=lambda case: several_ranks(case) and several_tokens(case))
def test_later_call_of_a_loaded_producer_is_right(layer: LayerSubject) -> None:
    """Loaded once, a producer is right after a call with the same tokens in another order and one without any."""
    layer.require_support(deferral=True)
    judge_rows(layer, deferred(layer))

    def one_rank(group: ThreadRankGroup) -> RoutedOutput:
        loaded = layer.producer.load(on_device(layer.parts[group.rank], layer.settings.device), layer.config())
        batch = layer.batch(layer.inputs)
        loaded(*batch)
        loaded(*of_tokens(batch, torch.arange(0)))
        return loaded(*of_tokens(batch, backwards))

    backwards = torch.arange(layer.case.tokens).flip(0)
    outputs = on_every_rank(layer.name, layer.settings, layer.case.ranks, one_rank)
    judge_rows(layer, outputs, tokens=backwards)


@clause("NUM-1")
@layers({"activation": "relu2", "stratum": "lattice"}, where=several_ranks)
def test_rows_of_small_integers_are_exact(layer: LayerSubject) -> None:
    """On small integers every order of accumulation gives the same value, so rows have to be equal to it."""
    judge_rows(layer, deferred(layer))


@clause("NUM-1")
@pairs(
    {},
    {"method": "deepseek-v3", "scale": 2.5, "shared_intermediate_size": 32, "biases": True},
    {"method": "minimax2", "scale": 2.0, "ep": 2, "weight_bias": 1.0},
    # With more ranks, the worst-case bound of profiles that round at each rank is wider than one rank's expert.
    where=lambda case: case.ranks <= 8,
)
def test_layer_and_tail_together_are_within_the_bound(pair: PairSubject) -> None:
    """A producer's own bits through a consumer: each stage within its bound, over tensor and expert parallel ranks."""
    pair.require_support()
    inputs = pair.hand_over()
    if is_unfinalized(inputs.outputs[0].routed):
        judge_rows(pair.layer, [output.routed for output in inputs.outputs])
    pair.tail.judge(pair.tail.run(inputs), inputs)


@clause("NUM-2")
@tails({"stratum": "normal", "shared": True, "absent": "quarter"})
def test_repeats_of_a_tail_give_the_same_bits(tail: TailSubject) -> None:
    """A consumer that declares bitwise determinism gives the same bits for the same inputs."""
    if tail.declaration.determinism is Determinism.VARIES:
        raise UnsupportedCaseError(f"{tail.name} declares that results vary from run to run")
    first = tail.run()
    for _ in range(REPEATS - 1):
        require_identical(tail, first, tail.run(), "a repeat")


@clause("NUM-2")
@layers(where=several_ranks)
def test_repeats_of_a_producer_give_the_same_routes(layer: LayerSubject) -> None:
    """The same inputs give the same weights and, route by route, the same rows; where the rows lie may change."""
    if layer.declaration.determinism is Determinism.VARIES:
        raise UnsupportedCaseError(f"{layer.name} declares that results vary from run to run")
    first = deferred(layer)
    layer.require_contract(first)
    for _ in range(REPEATS - 1):
        for rank, (a, b) in enumerate(zip(first, deferred(layer), strict=True)):
            assert not isinstance(a, Tensor) and not isinstance(b, Tensor)
            require_same(a.expert_weights, b.expert_weights, "NUM-2", "expert_weights", "a repeat", rank)
            rows = [o.gemm2_permuted[o.expanded_idx_to_permuted_idx.long().clamp(min=0)] for o in (a, b)]
            require_same(rows[0].flatten(1), rows[1].flatten(1), "NUM-2", "gathered rows", "a repeat", rank)
