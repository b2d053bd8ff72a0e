"""The known kinds of faults, each with what it would have given for one token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_contract import MoEOutput
from moe_contract.outputs import require_unfinalized


@dataclass(frozen=True)
class Suspect:
    """A kind of fault, the clause that it breaks, and what it would have given."""

    clause: str
    sentence: str
    result: Tensor
    """``[H]`` what the residual output of the token would be."""


@dataclass(frozen=True)
class RankPart:
    """One rank's part of one token, float64: ``rows [K, H]`` (0 where absent), ``weights [K]``, ``shared [H]``."""

    rows: Tensor
    weights: Tensor
    present: Tensor
    shared: Tensor
    scale: float
    output: MoEOutput
    token: int

    @property
    def routed(self) -> Tensor:
        """``[H]`` the top-k sum, not scaled."""
        return self.combine(self.weights)

    @property
    def local(self) -> Tensor:
        """``[H]`` what this rank contributes to the reduction."""
        return self.scale * self.routed + self.shared

    def combine(self, weights: Tensor) -> Tensor:
        """Sum over the present slots with other weights."""
        weights = torch.where(self.present, weights, 0.0)
        return (weights.unsqueeze(1) * self.rows).sum(0)


def rank_part(output: MoEOutput, token: int) -> RankPart:
    """The rank's part of the token, taken from its output."""
    shared = output.shared_output
    routed = output.routed
    scale = float(output.routed_scaling_factor)
    if isinstance(routed, Tensor):
        row = routed[token : token + 1].double()
        one, there = (
            torch.ones(1, dtype=torch.float64, device=row.device),
            torch.ones(1, dtype=torch.bool, device=row.device),
        )
        extra = torch.zeros_like(row[0]) if shared is None else shared[token].double()
        return RankPart(row, one, there, extra, scale, output, token)
    index = routed.expanded_idx_to_permuted_idx[token].long()
    present = index >= 0
    if routed.gemm2_permuted.shape[0]:
        rows = torch.where(present.unsqueeze(1), routed.gemm2_permuted[index.clamp(min=0)].double(), 0.0)
    else:
        rows = torch.zeros(len(index), routed.gemm2_permuted.shape[1], dtype=torch.float64, device=index.device)
    extra = torch.zeros_like(rows[0]) if shared is None else shared[token].double()
    return RankPart(rows, routed.expert_weights[token].double(), present, extra, scale, output, token)


def suspects(ranks: list[RankPart], residual: Tensor, own: int) -> Iterator[Suspect]:
    """Every known fault of a token with this ``residual [H]``, as rank ``own`` would see it."""
    total = sum((rank.local for rank in ranks), torch.zeros_like(residual))
    yield from _absent_slots(ranks, total + residual)
    yield from _map_order(ranks, total + residual)
    yield from _weights(ranks, residual)
    yield from _scale(ranks, residual)
    yield from _shared(ranks, total + residual)
    yield from _reduction(ranks, total, residual, own)
    yield from _residual(ranks, total, residual)


def _absent_slots(ranks: list[RankPart], correct: Tensor) -> Iterator[Suspect]:
    """A -1 used as an index: Python and C read the last row or the one before the first; kernels often clamp to 0."""
    for which, name in ((-1, "last"), (0, "first")):
        extra = torch.zeros_like(correct)
        slots: list[str] = []
        for number, rank in enumerate(ranks):
            if isinstance(rank.output.routed, Tensor) or not rank.output.routed.gemm2_permuted.shape[0]:
                continue
            absent = (~rank.present).nonzero().reshape(-1).tolist()
            row = rank.output.routed.gemm2_permuted[which].double()
            for slot in absent:
                extra = extra + rank.scale * rank.weights[slot] * row
                slots.append(f"slot {slot} of rank {number}" if len(ranks) > 1 else f"slot {slot}")
        if slots:
            more = f" (and {len(slots) - 1} more)" if len(slots) > 1 else ""
            sentence = f"{slots[0]}{more} is -1: the {name} row was read as this slot's row"
            yield Suspect("MAP-4", sentence, correct + extra)


def _map_order(ranks: list[RankPart], correct: Tensor) -> Iterator[Suspect]:
    replaced = torch.zeros_like(correct)
    for rank in ranks:
        if isinstance(rank.output.routed, Tensor):
            return
        routed = rank.output.routed
        index = routed.expanded_idx_to_permuted_idx
        slot_major = index.reshape(-1).view(index.shape[1], index.shape[0]).T[rank.token].long()
        if bool((slot_major < 0).any()):
            return
        rows = routed.gemm2_permuted[slot_major].double()
        replaced = replaced + rank.scale * ((rank.weights.unsqueeze(1) * rows).sum(0) - rank.routed)
    yield Suspect("MAP-1", "the map was read slot-major, as [K, T]", correct + replaced)


def _weights(ranks: list[RankPart], residual: Tensor) -> Iterator[Suspect]:
    def with_weights(new: list[Tensor]) -> Tensor:
        parts = (rank.scale * rank.combine(weights) + rank.shared for rank, weights in zip(ranks, new, strict=True))
        return sum(parts, residual)

    if any(isinstance(rank.output.routed, Tensor) for rank in ranks):
        return
    yield Suspect(
        "WGT-4", "the routing weight was not applied", with_weights([torch.ones_like(r.weights) for r in ranks])
    )
    yield Suspect("WGT-4", "the routing weight was applied twice", with_weights([r.weights**2 for r in ranks]))
    routed = require_unfinalized(ranks[0].output)
    dtype = routed.gemm2_permuted.dtype
    if routed.expert_weights.dtype == torch.float32:
        name = str(dtype).removeprefix("torch.")
        misread = [_reinterpreted(rank, dtype) for rank in ranks]
        yield Suspect("WGT-2", f"float32 weights were read as {name}", with_weights(misread))
        rounded = [rank.weights.to(dtype).double() for rank in ranks]
        yield Suspect("WGT-2", f"float32 weights were rounded to {name} before use", with_weights(rounded))


def _reinterpreted(rank: RankPart, dtype: torch.dtype) -> Tensor:
    weights = require_unfinalized(rank.output).expert_weights
    top_k = weights.shape[1]
    start = rank.token * top_k
    return weights.contiguous().view(dtype).reshape(-1)[start : start + top_k].double().nan_to_num(0.0)


def _scale(ranks: list[RankPart], residual: Tensor) -> Iterator[Suspect]:
    def with_power(power: int) -> Tensor:
        return sum((rank.scale**power * rank.routed + rank.shared for rank in ranks), residual)

    yield Suspect("SCALE-1", "routed_scaling_factor was not applied", with_power(0))
    yield Suspect("SCALE-1", "routed_scaling_factor was applied twice", with_power(2))
    both = sum((rank.scale * (rank.routed + rank.shared) for rank in ranks), torch.zeros_like(residual))
    yield Suspect("SHARED-2", "the shared output was multiplied by routed_scaling_factor", both + residual)
    yield Suspect("SCALE-2", "the residual was multiplied by routed_scaling_factor", both + ranks[0].scale * residual)


def _shared(ranks: list[RankPart], correct: Tensor) -> Iterator[Suspect]:
    shared = sum((rank.shared for rank in ranks), torch.zeros_like(correct))
    count = len(ranks)
    yield Suspect("SHARED-1", "the shared output was left out", correct - shared)
    yield Suspect("SHARED-1", "the shared output was added twice", correct + shared)
    if count > 2:
        sentence = f"the shared output was added {count} times, once a rank after it was reduced"
        yield Suspect("SHARED-1", sentence, correct + (count - 1) * shared)
    weighted = sum((rank.shared * (rank.weights.sum() - 1.0) for rank in ranks), torch.zeros_like(correct))
    yield Suspect("SHARED-2", "the shared output was multiplied by the routing weights", correct + weighted)


def _reduction(ranks: list[RankPart], total: Tensor, residual: Tensor, own: int) -> Iterator[Suspect]:
    count = len(ranks)
    if count == 1:
        return
    for peer, rank in enumerate(ranks):
        yield Suspect("RED-1", f"the contribution of rank {peer} is missing", total - rank.local + residual)
        yield Suspect("RED-1", f"the contribution of rank {peer} was added twice", total + rank.local + residual)
    for peer in range(count):
        if peer != own:
            copied = total - ranks[peer].local + ranks[own].local + residual
            yield Suspect("RED-1", f"rank {own}'s own data stands in for that of rank {peer}", copied)
    yield Suspect("RED-1", "nothing was reduced: only this rank's part is there", ranks[own].local + residual)
    yield Suspect(
        "RED-1", f"this rank's part was multiplied by {count}, not summed", count * ranks[own].local + residual
    )
    yield Suspect("RED-1", f"the sum was reduced twice ({count} times too large)", count * total + residual)


def _residual(ranks: list[RankPart], total: Tensor, residual: Tensor) -> Iterator[Suspect]:
    yield Suspect("RED-3", "the residual was left out", total)
    yield Suspect("RED-3", "the residual was added twice", total + 2 * residual)
    if len(ranks) > 2:
        times = len(ranks)
        yield Suspect("RED-3", f"the residual was added {times} times, once a rank", total + times * residual)
