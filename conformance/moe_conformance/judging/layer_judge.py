"""Judging what a producer hands over: slots matched to the oracle's experts, rows and weights to their bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.judging.judge import bound_ratio
from moe_conformance.truth import bounds
from moe_conformance.truth.layer_oracle import RankTruth
from moe_contract import ExpertWeights, MoELayer, Routing, UnfinalizedMoEOutput, Violation


@dataclass(frozen=True)
class RowJudgement:
    """``headroom`` = max(error / bound) over rows and weights; ``violation`` is None for a correct output."""

    headroom: float
    violation: Violation | None


def judge_rank(output: UnfinalizedMoEOutput, truth: RankTruth, rank: int, clause: str, part: MoELayer) -> RowJudgement:
    """Rows and weights of one rank's output against its truth. ``clause`` is blamed where no cause is known."""
    index = output.expanded_idx_to_permuted_idx.long().cpu()
    rows = _gather(output.gemm2_permuted.cpu(), index)
    weights = output.expert_weights.cpu().double()
    row_ratio = bound_ratio(rows, truth.rows, truth.row_bounds).amax(-1)
    aligned = _aligned(truth, rows, index >= 0, weights, row_ratio <= 1.0)
    if aligned is not truth:
        truth, row_ratio = aligned, bound_ratio(rows, aligned.rows, aligned.row_bounds).amax(-1)
    presence = _presence(index >= 0, truth, rank)
    if presence is not None:
        return RowJudgement(float("inf"), presence)
    row_ratio = torch.where(truth.present, row_ratio, 0.0)
    weight_ratio = bound_ratio(weights, truth.weights, truth.weight_bounds)
    headroom = max(float(row_ratio.max()), float(weight_ratio.max())) if row_ratio.numel() else 0.0
    if bool((row_ratio > 1.0).any()):
        dtype = output.gemm2_permuted.dtype
        return RowJudgement(headroom, _row_violation(rows, truth, row_ratio, rank, clause, part.experts, dtype))
    if bool((weight_ratio > 1.0).any()):
        dtype = output.expert_weights.dtype
        return RowJudgement(headroom, _weight_violation(weights, truth, weight_ratio, rank, part.routing, dtype))
    return RowJudgement(headroom, None)


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """``[T, K, H]`` float64, 0 where absent."""
    if rows.shape[0] == 0:
        return torch.zeros(*index.shape, rows.shape[1], dtype=torch.float64)
    return torch.where((index >= 0).unsqueeze(-1), rows[index.clamp(min=0)].double(), 0.0)


def _aligned(truth: RankTruth, rows: Tensor, present: Tensor, weights: Tensor, fits: Tensor) -> RankTruth:
    """The truth with its slots in the order the producer chose. The contract leaves the order within a token open.

    A slot's expert is told by its row, that of an absent slot by its weight; tokens whose slots fit none keep the
    oracle's order.
    """
    # Of an absent slot only its weight is seen, so only that can say which expert it is about.
    weighted = bound_ratio(weights, truth.weights, truth.weight_bounds) <= 1.0
    in_order = (present == truth.present) & torch.where(present, fits, weighted)
    tokens = (~in_order.all(1)).nonzero().reshape(-1).tolist()
    if not tokens:
        return truth
    order = torch.arange(truth.ids.shape[1]).repeat(truth.ids.shape[0], 1)
    for token in tokens:
        order[token] = _order_of(token, truth, rows, present, weights)
    wide = order.unsqueeze(-1).expand(-1, -1, rows.shape[-1])
    return RankTruth(
        ids=truth.ids.gather(1, order),
        present=truth.present.gather(1, order),
        rows=truth.rows.gather(1, wide),
        row_bounds=truth.row_bounds.gather(1, wide),
        weights=truth.weights.gather(1, order),
        weight_bounds=truth.weight_bounds.gather(1, order),
    )


def _order_of(token: int, truth: RankTruth, rows: Tensor, present: Tensor, weights: Tensor) -> Tensor:
    """For each slot of the producer the oracle slot that fits it; leftovers are matched by weight, then in order."""
    top_k = truth.ids.shape[1]
    free = list(range(top_k))
    order: list[int | None] = [None] * top_k
    for slot in present[token].nonzero().reshape(-1).tolist():
        ratios = bound_ratio(rows[token, slot], truth.rows[token], truth.row_bounds[token]).amax(-1)
        fitting = [other for other in free if bool(truth.present[token, other]) and float(ratios[other]) <= 1.0]
        if fitting:
            order[slot] = fitting[0]
            free.remove(fitting[0])
    for slot in range(top_k):
        if order[slot] is None:
            same = [other for other in free if bool(truth.present[token, other]) == bool(present[token, slot])]
            distances = {
                other: abs(float(weights[token, slot] - truth.weights[token, other])) for other in same or free
            }
            nearest = min(distances, key=lambda other: distances[other])
            order[slot] = nearest
            free.remove(nearest)
    return torch.tensor(order)


def _presence(present: Tensor, truth: RankTruth, rank: int) -> Violation | None:
    """Whether exactly the slots whose expert is on this rank are valid."""
    wrong = present != truth.present
    if not bool(wrong.any()):
        return None
    token, slot = (int(i) for i in wrong.nonzero()[0])
    expert = int(truth.ids[token, slot])
    here = bool(truth.present[token, slot])
    return Violation(
        clause="MAP-5",
        field="expanded_idx_to_permuted_idx",
        got="-1" if here else "a row",
        expected=f"a row: expert {expert} is on this rank" if here else f"-1: expert {expert} is not on this rank",
        rank=rank,
        token=token,
        slot=slot,
        count=int(wrong.sum()),
    )


def _row_violation(
    rows: Tensor,
    truth: RankTruth,
    ratio: Tensor,
    rank: int,
    clause: str,
    experts: ExpertWeights,
    dtype: torch.dtype,
) -> Violation:
    token, slot = (int(i) for i in (ratio > 1.0).nonzero()[0])
    row, expected, bound = rows[token, slot], truth.rows[token, slot], truth.row_bounds[token, slot]
    column = int(bound_ratio(row, expected, bound).argmax())
    cause, hint = _explain_row(row, truth, token, slot, experts, dtype) or (clause, "")
    return Violation(
        clause=cause,
        field="gemm2_permuted",
        got=f"{float(row[column]):.7g}",
        expected=f"{float(expected[column]):.7g}",
        bound=float(bound[column]),
        hint=hint,
        rank=rank,
        token=token,
        slot=slot,
        column=column,
        value=float(row[column]),
        count=int((ratio > 1.0).sum()),
    )


def _explain_row(
    row: Tensor, truth: RankTruth, token: int, slot: int, experts: ExpertWeights, dtype: torch.dtype
) -> tuple[str, str] | None:
    """The clause and the cause of a wrong row, if it is within the bound of a row that is wrong in a known way."""
    expected, bound = truth.rows[token, slot], truth.row_bounds[token, slot]
    weight, weight_bound = truth.weights[token, slot], truth.weight_bounds[token, slot]
    weighted_bound = (weight.abs() + weight_bound) * bound + weight_bound * expected.abs()
    if _fits(row, weight * expected, weighted_bound, dtype):
        return "ROWS-3", f"the row was multiplied by its routing weight {float(weight):.4g}"
    if experts.down_bias is not None:
        bias = experts.down_bias[int(truth.ids[token, slot]) % experts.down_bias.shape[0]].double()
        for times, what in ((-1, "is missing from the row"), (1, "is in the row twice")):
            if _fits(row, expected + times * bias, bound, dtype):
                return "ROWS-6", f"the expert's down bias {what}"
    return None


def _fits(got: Tensor, candidate: Tensor, error: Tensor, dtype: torch.dtype) -> bool:
    """Whether every element lies where a producer of the candidate could have put it: ``error`` before one more
    rounding to ``dtype``."""
    return bool((bound_ratio(got, candidate, bounds.store(candidate, error, dtype)) <= 1.0).all())


def _weight_violation(
    weights: Tensor, truth: RankTruth, ratio: Tensor, rank: int, routing: Routing, dtype: torch.dtype
) -> Violation:
    token, slot = (int(i) for i in (ratio > 1.0).nonzero()[0])
    got, expected = float(weights[token, slot]), float(truth.weights[token, slot])
    clause, hint = _explain_weights(weights, truth, routing, dtype)
    return Violation(
        clause=clause,
        field="expert_weights",
        got=f"{got:.7g}",
        expected=f"{expected:.7g}",
        bound=float(truth.weight_bounds[token, slot]),
        hint=hint,
        rank=rank,
        token=token,
        slot=slot,
        value=got,
        count=int((ratio > 1.0).sum()),
    )


def _explain_weights(weights: Tensor, truth: RankTruth, routing: Routing, dtype: torch.dtype) -> tuple[str, str]:
    scale, method = routing.routed_scaling_factor, routing.method.value
    if scale != 1.0:
        if _fits(weights, scale * truth.weights, scale * truth.weight_bounds, dtype):
            return "SCALE-3", f"the scale is folded into the weights of {method}, but the declaration says it is not"
        if _fits(weights, truth.weights / scale, truth.weight_bounds / scale, dtype):
            return "SCALE-3", f"the declaration says that {method} folds the scale into the weights, but it does not"
    if moved := _moved(weights, truth, dtype):
        return "WGT-1", moved
    return "WGT-3", "the bytes do not decode to the routing weight of this slot's expert"


def _moved(weights: Tensor, truth: RankTruth, dtype: torch.dtype) -> str:
    """In which other place the right weights stand; empty where they stand in none."""
    order = truth.weights.sort(1)
    if _fits(weights.sort(1).values, order.values, truth.weight_bounds.gather(1, order.indices), dtype):
        return "each token's weights are right and stand in another order than its map entries"
    for step, name in ((1, "before"), (-1, "after")):
        if len(weights) > 1 and _fits(weights, truth.weights.roll(step, 0), truth.weight_bounds.roll(step, 0), dtype):
            return f"the weights are those of the token {name}"
    return ""
