"""Router logits to experts and routing weights, for every routing method, in float32 with one rounding at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_contract.layer import PrecomputedRouting, Routing, RoutingMethod

SUM_EPSILON = 1e-20
"""Guards the renormalising division; the constant of DeepSeek-V3's router, which FlashInfer's kernels copy."""
GROUP_SCORE_EXPERTS = 2
"""DeepSeek-V3 scores a group by the sum of its two best experts."""


@dataclass(frozen=True)
class RoutedTokens:
    """The routing of a batch: ``ids [T, K]`` int64 global expert ids, ``weights [T, K]``.

    Slots are in order of descending selection score, equal scores in order of ascending expert id.
    """

    ids: Tensor
    weights: Tensor


def route(
    routing: Routing,
    router_logits: Tensor | PrecomputedRouting,
    *,
    fold_scale: bool,
    weights_dtype: torch.dtype,
) -> RoutedTokens:
    """Selects ``top_k`` experts per token and their weights.

    Args:
        routing: method and parameters.
        router_logits: ``[T, E]`` floating point, or the finished routing for PRECOMPUTED.
        fold_scale: multiply the float32 weights by the routed scaling factor before they are rounded.
        weights_dtype: what the weights are rounded to, once.

    Raises:
        ValueError: arguments that do not fit together, named with what was expected.
    """
    if isinstance(router_logits, PrecomputedRouting):
        return _precomputed(routing, router_logits, fold_scale, weights_dtype)
    if routing.method is RoutingMethod.PRECOMPUTED:
        raise ValueError("routing method precomputed: expected PrecomputedRouting(ids, weights), got router logits")
    if router_logits.dim() != 2 or not router_logits.is_floating_point():
        raise ValueError(
            "router_logits: expected a floating-point tensor of shape [T, E], "
            f"got {router_logits.dtype} of shape {list(router_logits.shape)}"
        )
    require_routing(routing, router_logits.shape[1])
    ids, weights = _METHODS[routing.method](routing, router_logits.float())
    if fold_scale:
        weights = weights * routing.routed_scaling_factor
    return RoutedTokens(ids, weights.to(weights_dtype))


def require_routing(routing: Routing, num_experts: int) -> None:
    """Refuses parameters that no batch could be routed with; ValueError says which and why."""
    name = f"routing method {routing.method}"
    if not 1 <= routing.top_k <= num_experts:
        raise ValueError(f"{name}: top_k must be in 1..num_experts ({num_experts}), got {routing.top_k}")
    if routing.method.weights_input and routing.top_k != 1:
        raise ValueError(f"{name}: weights the input of a single expert, so top_k must be 1, got {routing.top_k}")
    if routing.method is RoutingMethod.DEEPSEEK_V3:
        _require_groups(routing, num_experts)
    if routing.bias is None or routing.method is RoutingMethod.PRECOMPUTED:
        return
    if not routing.method.takes_bias:
        raise ValueError(f"{name}: takes no selection bias, but routing.bias is set; expected None")
    if tuple(routing.bias.shape) != (num_experts,):
        raise ValueError(f"{name}: bias must have shape [{num_experts}], got {list(routing.bias.shape)}")


def _require_groups(routing: Routing, num_experts: int) -> None:
    groups, kept = routing.num_groups, routing.topk_groups
    if groups < 1 or num_experts % groups:
        raise ValueError(f"routing method {routing.method}: num_groups {groups} must divide {num_experts} experts")
    if not 1 <= kept <= groups:
        raise ValueError(f"routing method {routing.method}: topk_groups must be in 1..{groups} (groups), got {kept}")
    reachable = kept * (num_experts // groups)
    if routing.top_k > reachable:
        raise ValueError(
            f"routing method {routing.method}: top_k {routing.top_k} is more than the {reachable} experts "
            f"in the {kept} kept groups of {num_experts // groups}"
        )


def _precomputed(
    routing: Routing, given: PrecomputedRouting, fold_scale: bool, weights_dtype: torch.dtype
) -> RoutedTokens:
    if routing.method is not RoutingMethod.PRECOMPUTED:
        raise ValueError(f"routing method {routing.method}: expected router logits [T, E], got PrecomputedRouting")
    if fold_scale:
        raise ValueError("routing method precomputed: weights are used verbatim, so the scale cannot be folded in")
    for field, tensor in (("ids", given.ids), ("weights", given.weights)):
        if tensor.dim() != 2 or tensor.shape[1] != routing.top_k:
            raise ValueError(f"precomputed {field}: expected [T, {routing.top_k}], got {list(tensor.shape)}")
    if given.ids.shape[0] != given.weights.shape[0]:
        raise ValueError(f"precomputed ids have {given.ids.shape[0]} tokens, weights {given.weights.shape[0]}")
    if given.ids.dtype not in (torch.int32, torch.int64) or not given.weights.is_floating_point():
        raise ValueError(
            "precomputed routing: expected int32 or int64 ids and floating-point weights, "
            f"got {given.ids.dtype} and {given.weights.dtype}"
        )
    # Copies: the caller may reuse its tensors while the output is still pending (OUT-5).
    return RoutedTokens(given.ids.to(torch.int64, copy=True), given.weights.to(weights_dtype, copy=True))


def _top(scores: Tensor, count: int) -> Tensor:
    """Ids of the highest scores; torch.topk leaves the order of equal scores open, a stable sort does not."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


# Softmax and sigmoid preserve order, so every method that ranks by one of them alone ranks by the logits: the same
# experts in exact arithmetic, and no false ties between logits whose float32 scores saturate or underflow.


def _softmax_all(routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = _top(logits, routing.top_k)
    return ids, logits.softmax(dim=-1).gather(1, ids)


def _softmax_selected(routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = _top(logits, routing.top_k)
    return ids, logits.gather(1, ids).softmax(dim=-1)


def _softmax_renormalised(routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
    ids, weights = _softmax_all(routing, logits)
    return ids, weights / weights.sum(dim=-1, keepdim=True)


def _raw_logit(routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = _top(logits, routing.top_k)
    return ids, logits.gather(1, ids)


def _sigmoid(routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = _top(logits, routing.top_k)
    return ids, logits.gather(1, ids).sigmoid()


def _sigmoid_renormalised(routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
    ids, weights = _sigmoid(routing, logits)
    if routing.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(SUM_EPSILON)
    return ids, weights


def _sigmoid_biased(routing: Routing, logits: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.sigmoid()
    biased = scores if routing.bias is None else scores + routing.bias.to(logits)
    if routing.method is RoutingMethod.DEEPSEEK_V3 and routing.num_groups > 1:
        biased = _mask_dropped_groups(routing, biased)
    ids = _top(biased, routing.top_k)
    weights = scores.gather(1, ids)
    return ids, weights / (weights.sum(dim=-1, keepdim=True) + SUM_EPSILON)


def _mask_dropped_groups(routing: Routing, biased: Tensor) -> Tensor:
    """Minus infinity for every expert outside the ``topk_groups`` groups with the highest scores."""
    grouped = biased.view(biased.shape[0], routing.num_groups, -1)
    best = grouped.topk(min(GROUP_SCORE_EXPERTS, grouped.shape[-1]), dim=-1).values
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=biased.device)
    kept.scatter_(1, _top(best.sum(dim=-1), routing.topk_groups), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)


_METHODS: dict[RoutingMethod, Callable[[Routing, Tensor], tuple[Tensor, Tensor]]] = {
    RoutingMethod.DEFAULT: _softmax_all,
    RoutingMethod.RENORMALIZE: _softmax_selected,
    RoutingMethod.DEEPSEEK_V3: _sigmoid_biased,
    RoutingMethod.LLAMA4: _sigmoid,
    RoutingMethod.RENORMALIZE_NAIVE: _softmax_renormalised,
    RoutingMethod.TOPK: _raw_logit,
    RoutingMethod.SIGMOID_RENORM: _sigmoid_renormalised,
    RoutingMethod.MINIMAX2: _sigmoid_biased,
    RoutingMethod.SIGMOID: _sigmoid,
    RoutingMethod.TOPK_SIGMOID: _sigmoid,
}
