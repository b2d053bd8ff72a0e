"""Every routing method against a derivation in Python floats (float64), one token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_backends.common.routing import route
from moe_contract import PrecomputedRouting, Routing, RoutingMethod

METHODS = [method for method in RoutingMethod if method is not RoutingMethod.PRECOMPUTED]
BIASED = {RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2}
NUM_EXPERTS = 16
LOGIT_RANGE = 8.0
FP32_UNIT = 2.0**-24
WEIGHT_BOUND = (NUM_EXPERTS + LOGIT_RANGE + 16) * FP32_UNIT
"""Relative: a sum of E terms, the rounded argument of exp (|x| u), two exp of 2 ulp (8 u), at most 8 more roundings."""


def top_k_for(method: RoutingMethod) -> int:
    """LLAMA4 has one slot by definition."""
    return 1 if method is RoutingMethod.LLAMA4 else 4


def sigmoid(x: float) -> float:
    """In float64."""
    return 1.0 / (1.0 + math.exp(-x))


def softmax(xs: list[float]) -> list[float]:
    """In float64."""
    top = max(xs)
    exps = [math.exp(x - top) for x in xs]
    return [e / sum(exps) for e in exps]


def best(scores: list[float], count: int) -> list[int]:
    """Positions of the highest scores, equal scores by position."""
    return sorted(range(len(scores)), key=lambda e: (-scores[e], e))[:count]


def selection_scores(routing: Routing, logits: list[float]) -> list[float]:
    """What a method ranks experts by."""
    if routing.method not in BIASED:
        return logits
    bias = [0.0] * len(logits) if routing.bias is None else routing.bias.tolist()
    scores = [sigmoid(x) + b for x, b in zip(logits, bias, strict=True)]
    if routing.method is RoutingMethod.MINIMAX2:
        return scores
    size = len(scores) // routing.num_groups
    groups = [scores[g * size : (g + 1) * size] for g in range(routing.num_groups)]
    kept = best([sum(sorted(group)[-2:]) for group in groups], routing.topk_groups)
    return [s if e // size in kept else -math.inf for e, s in enumerate(scores)]


def expected_token(routing: Routing, logits: list[float]) -> tuple[list[int], list[float]]:
    """Ids and unscaled weights of one token."""
    ids = best(selection_scores(routing, logits), routing.top_k)
    chosen = [logits[e] for e in ids]
    match routing.method:
        case RoutingMethod.DEFAULT:
            return ids, [softmax(logits)[e] for e in ids]
        case RoutingMethod.RENORMALIZE | RoutingMethod.RENORMALIZE_NAIVE:
            return ids, softmax(chosen)
        case RoutingMethod.TOPK:
            return ids, chosen
        case RoutingMethod.SIGMOID | RoutingMethod.TOPK_SIGMOID | RoutingMethod.LLAMA4:
            return ids, [sigmoid(x) for x in chosen]
    weights = [sigmoid(x) for x in chosen]
    if routing.method is RoutingMethod.SIGMOID_RENORM and not routing.norm_topk_prob:
        return ids, weights
    return ids, [w / sum(weights) for w in weights]


def assert_routes_as_derived(routing: Routing, logits: Tensor) -> None:
    """Ids exactly; weights within the bound."""
    routed = route(routing, logits, fold_scale=False, weights_dtype=torch.float32)
    assert routed.ids.dtype == torch.int64
    for token, row in enumerate(logits.tolist()):
        ids, weights = expected_token(routing, row)
        assert routed.ids[token].tolist() == ids, f"token {token}"
        for got, want in zip(routed.weights[token].tolist(), weights, strict=True):
            assert abs(got - want) <= WEIGHT_BOUND * abs(want), f"token {token}: {got} instead of {want}"


def random_logits(num_tokens: int = 40, dtype: torch.dtype = torch.float32) -> Tensor:
    """Within +-LOGIT_RANGE / 2, so that differences are within LOGIT_RANGE."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator)
    return logits.clamp(-LOGIT_RANGE / 2, LOGIT_RANGE / 2).to(dtype)


def tied_logits(num_tokens: int = 40) -> Tensor:
    """Five distinct values over 16 experts: every token has ties, most of them across the top-k border."""
    generator = torch.Generator().manual_seed(11)
    return torch.randint(0, 5, (num_tokens, NUM_EXPERTS), generator=generator) / 2 + 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_method_selects_and_weights_as_defined(method: RoutingMethod, dtype: torch.dtype) -> None:
    """Ids and weights of a method are those of its definition, from the exact bits of the logits."""
    assert_routes_as_derived(Routing(method, top_k_for(method)), random_logits(dtype=dtype))


@pytest.mark.parametrize("method", METHODS)
def test_equal_scores_are_ordered_by_expert_id(method: RoutingMethod) -> None:
    """Among equal scores the lowest expert id comes first, inside the top-k and across its border."""
    assert_routes_as_derived(Routing(method, top_k_for(method)), tied_logits())


@pytest.mark.parametrize("method", sorted(BIASED))
def test_bias_steers_the_selection_only(method: RoutingMethod) -> None:
    """A bias changes which experts are chosen, and is in no weight."""
    bias = torch.randn(NUM_EXPERTS, generator=torch.Generator().manual_seed(3))
    logits = random_logits()
    assert_routes_as_derived(Routing(method, 4, bias=bias), logits)
    plain = route(Routing(method, 4), logits, fold_scale=False, weights_dtype=torch.float32)
    steered = route(Routing(method, 4, bias=bias), logits, fold_scale=False, weights_dtype=torch.float32)
    assert not torch.equal(plain.ids, steered.ids)


@pytest.mark.parametrize(("groups", "kept"), [(2, 1), (4, 2), (8, 4), (16, 4), (4, 4)])
def test_grouped_selection_stays_in_the_best_groups(groups: int, kept: int) -> None:
    """DEEPSEEK_V3 keeps the groups with the largest sum of two best scores; ties go to the first group."""
    bias = torch.randn(NUM_EXPERTS, generator=torch.Generator().manual_seed(5)) / 4
    assert_routes_as_derived(
        Routing(RoutingMethod.DEEPSEEK_V3, 4, num_groups=groups, topk_groups=kept, bias=bias), random_logits()
    )
    tied = Routing(RoutingMethod.DEEPSEEK_V3, 4, num_groups=groups, topk_groups=kept)
    assert_routes_as_derived(tied, tied_logits())


def test_group_score_is_the_sum_of_two_not_the_best() -> None:
    """A group with one outstanding expert loses to a group with two good ones."""
    logits = torch.full((1, 4), -4.0)
    logits[0, 0], logits[0, 2], logits[0, 3] = 3.0, 2.0, 2.0
    routing = Routing(RoutingMethod.DEEPSEEK_V3, 2, num_groups=2, topk_groups=1)
    routed = route(routing, logits, fold_scale=False, weights_dtype=torch.float32)
    assert routed.ids.tolist() == [[2, 3]]


def test_dropped_groups_lose_to_negative_scores() -> None:
    """A strongly negative bias cannot let an expert of a dropped group in."""
    bias = torch.full((4,), -5.0)
    bias[:2] = -4.0
    routing = Routing(RoutingMethod.DEEPSEEK_V3, 2, num_groups=2, topk_groups=1, bias=bias)
    routed = route(routing, torch.zeros(1, 4), fold_scale=False, weights_dtype=torch.float32)
    assert routed.ids.tolist() == [[0, 1]]


def test_renormalisation_can_be_switched_off() -> None:
    """SIGMOID_RENORM without norm_topk_prob is SIGMOID."""
    logits = random_logits()
    off = Routing(RoutingMethod.SIGMOID_RENORM, 4, norm_topk_prob=False)
    assert_routes_as_derived(off, logits)
    plain = route(Routing(RoutingMethod.SIGMOID, 4), logits, fold_scale=False, weights_dtype=torch.float32)
    assert torch.equal(route(off, logits, fold_scale=False, weights_dtype=torch.float32).weights, plain.weights)


@pytest.mark.parametrize("method", [RoutingMethod.DEFAULT, RoutingMethod.SIGMOID, RoutingMethod.SIGMOID_RENORM])
def test_saturated_scores_still_rank_by_logit(method: RoutingMethod) -> None:
    """Logits whose float32 scores collapse to one value keep their order."""
    logits = torch.tensor([[-200.0, 100.0, -150.0, 120.0]])
    routed = route(Routing(method, 4), logits, fold_scale=False, weights_dtype=torch.float32)
    assert routed.ids.tolist() == [[3, 1, 2, 0]]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_folding_rounds_the_scaled_weight_once(method: RoutingMethod, dtype: torch.dtype) -> None:
    """A folded weight is the float32 weight times the factor, rounded once; not the rounded weight times it."""
    routing = Routing(method, top_k_for(method), routed_scaling_factor=2.827)
    logits = random_logits()
    exact = route(routing, logits, fold_scale=False, weights_dtype=torch.float32).weights
    plain = route(routing, logits, fold_scale=False, weights_dtype=dtype).weights
    folded = route(routing, logits, fold_scale=True, weights_dtype=dtype).weights
    assert torch.equal(plain, exact.to(dtype))
    assert torch.equal(folded, (exact * 2.827).to(dtype))
    assert not torch.equal(folded, plain * 2.827)


def test_precomputed_routing_is_taken_verbatim() -> None:
    """Ids keep their order, repeats included, weights their value whatever the scaling factor, in new tensors."""
    given = PrecomputedRouting(
        torch.tensor([[5, 1], [0, 0]], dtype=torch.int32), torch.tensor([[0.1, 3.0], [-1.0, 0.3]])
    )
    routing = Routing(RoutingMethod.PRECOMPUTED, 2, routed_scaling_factor=2.5)
    routed = route(routing, given, fold_scale=False, weights_dtype=torch.float32)
    assert torch.equal(routed.ids, given.ids.long())
    assert torch.equal(routed.weights, given.weights)
    assert routed.weights.data_ptr() != given.weights.data_ptr()


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(RoutingMethod.TOPK, 17), r"top_k must be in 1..num_experts \(16\), got 17"),
        (Routing(RoutingMethod.TOPK, 0), r"top_k must be in 1..num_experts \(16\), got 0"),
        (Routing(RoutingMethod.LLAMA4, 2), "top_k must be 1, got 2"),
        (Routing(RoutingMethod.DEEPSEEK_V3, 2, num_groups=3), "num_groups 3 must divide 16 experts"),
        (Routing(RoutingMethod.DEEPSEEK_V3, 2, num_groups=4, topk_groups=5), r"topk_groups must be in .*got 5"),
        (Routing(RoutingMethod.DEEPSEEK_V3, 5, num_groups=4, topk_groups=1), "top_k 5 is more than the 4 experts"),
        (Routing(RoutingMethod.SIGMOID, 2, bias=torch.zeros(16)), "takes no selection bias"),
        (Routing(RoutingMethod.MINIMAX2, 2, bias=torch.zeros(15)), r"bias must have shape \[16\], got \[15\]"),
        (Routing(RoutingMethod.PRECOMPUTED, 2), "expected PrecomputedRouting"),
    ],
)
def test_impossible_routing_is_refused(routing: Routing, message: str) -> None:
    """Parameters that no batch can be routed with are named in the error."""
    with pytest.raises(ValueError, match=message):
        route(routing, torch.zeros(3, NUM_EXPERTS), fold_scale=False, weights_dtype=torch.float32)


@pytest.mark.parametrize("logits", [torch.zeros(16), torch.zeros(1, 3, 16), torch.zeros(3, 16, dtype=torch.int32)])
def test_logits_that_are_not_a_floating_matrix_are_refused(logits: Tensor) -> None:
    """Router logits are a floating-point [T, E]."""
    with pytest.raises(ValueError, match=r"expected a floating-point tensor of shape \[T, E\]"):
        route(Routing(RoutingMethod.TOPK, 2), logits, fold_scale=False, weights_dtype=torch.float32)


def test_precomputed_routing_of_the_wrong_form_is_refused() -> None:
    """Width, token count, dtypes, method and folding are each checked."""
    ids, weights = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2)
    precomputed = Routing(RoutingMethod.PRECOMPUTED, 2)
    wrong = [
        (precomputed, PrecomputedRouting(ids[:, :1], weights), False, r"ids: expected \[T, 2\], got \[3, 1\]"),
        (precomputed, PrecomputedRouting(ids, weights[:2]), False, "ids have 3 tokens, weights 2"),
        (precomputed, PrecomputedRouting(ids.float(), weights), False, "int32 or int64 ids"),
        (precomputed, PrecomputedRouting(ids, weights), True, "verbatim"),
        (Routing(RoutingMethod.TOPK, 2), PrecomputedRouting(ids, weights), False, "got PrecomputedRouting"),
    ]
    for routing, given, fold, message in wrong:
        with pytest.raises(ValueError, match=message):
            route(routing, given, fold_scale=fold, weights_dtype=torch.float32)
