"""Float64 truth of the routing methods, written apart from every backend: selection, weights, margins."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.truth.bounds import EXACT, U32
from moe_contract import PrecomputedRouting, Routing, RoutingMethod

EXP_ULPS = 8
"""Roundings granted to one exp, sigmoid or division chain of a router in float32, besides the argument's own."""
SIGMOID_BIASED = frozenset({RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2})


@dataclass(frozen=True)
class RoutedTruth:
    """``ids [T, K]`` by falling score, ``weights [T, K]`` float64 without the routed scaling factor, and the
    largest ``relative_error`` of a weight computed in float32, before its one rounding to the weights dtype."""

    ids: Tensor
    weights: Tensor
    relative_error: float


def route(routing: Routing, router_logits: Tensor | PrecomputedRouting) -> RoutedTruth:
    """The experts and weights of each token."""
    if isinstance(router_logits, PrecomputedRouting):
        return RoutedTruth(router_logits.ids.long(), router_logits.weights.to(EXACT), 0.0)
    logits = router_logits.to(EXACT)
    ids = selection_scores(routing, logits).topk(routing.top_k, dim=-1).indices
    weights = _weights(routing, logits, ids)
    # exp(x) in float32 loses |x| u on its argument; sums over E or K terms add at most log2 levels of a tree.
    argument = float(logits.abs().max()) * 2.0 if logits.numel() else 0.0
    return RoutedTruth(ids, weights, (argument + EXP_ULPS + logits.shape[1] ** 0.5) * U32)


def selection_scores(routing: Routing, logits: Tensor) -> Tensor:
    """``[T, E]`` what the top-k is taken of; minus infinity for experts of groups that are not kept."""
    if routing.method not in SIGMOID_BIASED:
        return logits
    scores = logits.sigmoid()
    if routing.bias is not None:
        scores = scores + routing.bias.to(EXACT)
    if routing.method is RoutingMethod.MINIMAX2 or routing.num_groups <= 1:
        return scores
    groups = group_scores(routing, scores)
    kept = torch.zeros_like(groups, dtype=torch.bool).scatter(1, groups.topk(routing.topk_groups, dim=-1).indices, True)
    mask = kept.repeat_interleave(logits.shape[1] // routing.num_groups, dim=1)
    return scores.masked_fill(~mask, -torch.inf)


def group_scores(routing: Routing, scores: Tensor) -> Tensor:
    """``[T, groups]`` sum of the two best scores of each group."""
    return scores.view(scores.shape[0], routing.num_groups, -1).topk(2, dim=-1).values.sum(-1)


def selection_gap(routing: Routing, logits: Tensor) -> Tensor:
    """``[T]`` least distance between neighbours that decide: the K + 1 best scores, and kept against other groups."""
    exact = logits.to(EXACT)
    scores = selection_scores(routing, exact)
    best = scores.topk(min(routing.top_k + 1, scores.shape[1]), dim=-1).values
    gap = (best[:, :-1] - best[:, 1:]).nan_to_num(torch.inf).amin(1) if best.shape[1] > 1 else torch.ones(len(best))
    if routing.method is RoutingMethod.DEEPSEEK_V3 and 1 < routing.num_groups > routing.topk_groups:
        full = exact.sigmoid() + (0.0 if routing.bias is None else routing.bias.to(EXACT))
        groups = group_scores(routing, full).topk(routing.topk_groups + 1, dim=-1).values
        gap = torch.minimum(gap, groups[:, -2] - groups[:, -1])
    return gap


def _weights(routing: Routing, logits: Tensor, ids: Tensor) -> Tensor:
    method = routing.method
    chosen = logits.gather(1, ids)
    if method is RoutingMethod.DEFAULT:
        return logits.softmax(-1).gather(1, ids)
    if method in (RoutingMethod.RENORMALIZE, RoutingMethod.RENORMALIZE_NAIVE):
        return chosen.softmax(-1)
    if method is RoutingMethod.TOPK:
        return chosen
    sigmoids = chosen.sigmoid()
    if method in SIGMOID_BIASED:
        # FlashInfer's routing runner guards the division with 1e-20.
        return sigmoids / (sigmoids.sum(-1, keepdim=True) + 1e-20)
    if method is RoutingMethod.SIGMOID_RENORM and routing.norm_topk_prob:
        return sigmoids / sigmoids.sum(-1, keepdim=True).clamp(min=1e-20)
    return sigmoids
