"""From a wrong value to its cause: each known kind of fault says what it would have given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_conformance.cases.tail_data import TailInputs
from moe_conformance.judging.judge import Place, judge
from moe_conformance.truth.bounds import UNIT_ROUNDOFF
from moe_conformance.truth.tail_oracle import Truth, residual_truth
from moe_contract import ConsumerDeclaration, MoEOutput, RoundingProfile
from moe_contract.outputs import require_unfinalized

SLACK = 4.0
"""A wrong result is compared with what a fault would have given to within this many bounds: the bound is the right
result's, and a fault that multiplies terms multiplies their rounding errors too."""


@dataclass(frozen=True)
class Cause:
    """A fault that gives exactly the wrong values that were seen: the clause it breaks and a sentence."""

    clause: str
    sentence: str


@dataclass(frozen=True)
class _Suspect:
    clause: str
    sentence: str
    result: Tensor
    """``[H]`` what the residual output of the token would be."""


@dataclass(frozen=True)
class _Rank:
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


def diagnose(inputs: TailInputs, got: Tensor, truth: Truth, place: Place, rank: int) -> Cause | None:
    """The known fault that explains the whole wrong row of ``residual_out`` at ``place``; None when none does."""
    ranks = [_rank_part(output, place.token) for output in inputs.outputs]
    residual = inputs.residual[place.token].double()
    row = got[place.token].double()
    expected, bound = truth.value[place.token], truth.bound[place.token]
    best: tuple[float, _Suspect] | None = None
    for suspect in _suspects(ranks, residual, rank):
        slack = SLACK * (bound + UNIT_ROUNDOFF[got.dtype] * suspect.result.abs())
        distance = float(((row - suspect.result).abs() / slack).max())
        differs = bool(((suspect.result - expected).abs() > slack).any())
        if differs and distance <= 1.0 and (best is None or distance < best[0]):
            best = distance, suspect
    if best is not None:
        return Cause(best[1].clause, best[1].sentence)
    if not bool(row.isfinite().all()) and bool(expected.isfinite().all()):
        return _leak(ranks)
    return _rounding(inputs, got, place)


def _rounding(inputs: TailInputs, got: Tensor, place: Place) -> Cause | None:
    """A whole result within the bound of a profile that rounds at more places. Lattice data, where the place has no
    bound of its own, has nothing to round, so there the error is of another kind."""
    if not place.bound:
        return None
    rounded = _with_rounded_weights(inputs)
    if rounded is not None and judge(got, residual_truth(rounded, _AS_C), exact=False).accepted:
        name = str(got.dtype).removeprefix("torch.")
        return Cause("WGT-2", f"float32 weights were rounded to {name} before use")
    for profile in (RoundingProfile.LOCAL_FP32, RoundingProfile.STEP_ROUNDED):
        declared = ConsumerDeclaration(name="looser", version="", profile=profile)
        if judge(got, residual_truth(inputs, declared), exact=False).accepted:
            where = f"within the bound of profile {profile.value}"
            return Cause("NUM-1", f"{where}: the result is rounded at more places than declared")
    return None


_AS_C = ConsumerDeclaration(name="tightest", version="", profile=RoundingProfile.FP32)
"""The profile with the fewest roundings, which leaves nothing else to explain an error with."""


def _with_rounded_weights(inputs: TailInputs) -> TailInputs | None:
    """The inputs with float32 weights rounded to the activation dtype; None where none are float32."""
    outputs = []
    for output in inputs.outputs:
        routed = output.routed
        if isinstance(routed, Tensor) or routed.expert_weights.dtype != torch.float32:
            return None
        weights = routed.expert_weights.to(routed.gemm2_permuted.dtype)
        outputs.append(replace(output, routed=replace(routed, expert_weights=weights)))
    return inputs.with_outputs(outputs)


def _rank_part(output: MoEOutput, token: int) -> _Rank:
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
        return _Rank(row, one, there, extra, scale, output, token)
    index = routed.expanded_idx_to_permuted_idx[token].long()
    present = index >= 0
    if routed.gemm2_permuted.shape[0]:
        rows = torch.where(present.unsqueeze(1), routed.gemm2_permuted[index.clamp(min=0)].double(), 0.0)
    else:
        rows = torch.zeros(len(index), routed.gemm2_permuted.shape[1], dtype=torch.float64, device=index.device)
    extra = torch.zeros_like(rows[0]) if shared is None else shared[token].double()
    return _Rank(rows, routed.expert_weights[token].double(), present, extra, scale, output, token)


def _suspects(ranks: list[_Rank], residual: Tensor, own: int) -> Iterator[_Suspect]:
    total = sum((rank.local for rank in ranks), torch.zeros_like(residual))
    yield from _absent_slots(ranks, total + residual)
    yield from _map_order(ranks, total + residual)
    yield from _weights(ranks, residual)
    yield from _scale(ranks, residual)
    yield from _shared(ranks, total + residual)
    yield from _reduction(ranks, total, residual, own)
    yield from _residual(ranks, total, residual)


def _absent_slots(ranks: list[_Rank], correct: Tensor) -> Iterator[_Suspect]:
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
            yield _Suspect("MAP-4", sentence, correct + extra)


def _map_order(ranks: list[_Rank], correct: Tensor) -> Iterator[_Suspect]:
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
    yield _Suspect("MAP-1", "the map was read slot-major, as [K, T]", correct + replaced)


def _weights(ranks: list[_Rank], residual: Tensor) -> Iterator[_Suspect]:
    def with_weights(new: list[Tensor]) -> Tensor:
        parts = (rank.scale * rank.combine(weights) + rank.shared for rank, weights in zip(ranks, new, strict=True))
        return sum(parts, residual)

    if any(isinstance(rank.output.routed, Tensor) for rank in ranks):
        return
    yield _Suspect(
        "WGT-4", "the routing weight was not applied", with_weights([torch.ones_like(r.weights) for r in ranks])
    )
    yield _Suspect("WGT-4", "the routing weight was applied twice", with_weights([r.weights**2 for r in ranks]))
    routed = require_unfinalized(ranks[0].output)
    dtype = routed.gemm2_permuted.dtype
    if routed.expert_weights.dtype == torch.float32:
        name = str(dtype).removeprefix("torch.")
        misread = [_reinterpreted(rank, dtype) for rank in ranks]
        yield _Suspect("WGT-2", f"float32 weights were read as {name}", with_weights(misread))
        rounded = [rank.weights.to(dtype).double() for rank in ranks]
        yield _Suspect("WGT-2", f"float32 weights were rounded to {name} before use", with_weights(rounded))


def _reinterpreted(rank: _Rank, dtype: torch.dtype) -> Tensor:
    weights = require_unfinalized(rank.output).expert_weights
    top_k = weights.shape[1]
    start = rank.token * top_k
    return weights.contiguous().view(dtype).reshape(-1)[start : start + top_k].double().nan_to_num(0.0)


def _scale(ranks: list[_Rank], residual: Tensor) -> Iterator[_Suspect]:
    def with_power(power: int) -> Tensor:
        return sum((rank.scale**power * rank.routed + rank.shared for rank in ranks), residual)

    yield _Suspect("SCALE-1", "routed_scaling_factor was not applied", with_power(0))
    yield _Suspect("SCALE-1", "routed_scaling_factor was applied twice", with_power(2))
    both = sum((rank.scale * (rank.routed + rank.shared) for rank in ranks), torch.zeros_like(residual))
    yield _Suspect("SHARED-2", "the shared output was multiplied by routed_scaling_factor", both + residual)
    yield _Suspect("SCALE-2", "the residual was multiplied by routed_scaling_factor", both + ranks[0].scale * residual)


def _shared(ranks: list[_Rank], correct: Tensor) -> Iterator[_Suspect]:
    shared = sum((rank.shared for rank in ranks), torch.zeros_like(correct))
    count = len(ranks)
    yield _Suspect("SHARED-1", "the shared output was left out", correct - shared)
    yield _Suspect("SHARED-1", "the shared output was added twice", correct + shared)
    if count > 2:
        sentence = f"the shared output was added {count} times, once a rank after it was reduced"
        yield _Suspect("SHARED-1", sentence, correct + (count - 1) * shared)
    weighted = sum((rank.shared * (rank.weights.sum() - 1.0) for rank in ranks), torch.zeros_like(correct))
    yield _Suspect("SHARED-2", "the shared output was multiplied by the routing weights", correct + weighted)


def _reduction(ranks: list[_Rank], total: Tensor, residual: Tensor, own: int) -> Iterator[_Suspect]:
    count = len(ranks)
    if count == 1:
        return
    for peer, rank in enumerate(ranks):
        yield _Suspect("RED-1", f"the contribution of rank {peer} is missing", total - rank.local + residual)
        yield _Suspect("RED-1", f"the contribution of rank {peer} was added twice", total + rank.local + residual)
    for peer in range(count):
        if peer != own:
            copied = total - ranks[peer].local + ranks[own].local + residual
            yield _Suspect("RED-1", f"rank {own}'s own data stands in for that of rank {peer}", copied)
    yield _Suspect("RED-1", "nothing was reduced: only this rank's part is there", ranks[own].local + residual)
    yield _Suspect(
        "RED-1", f"this rank's part was multiplied by {count}, not summed", count * ranks[own].local + residual
    )
    yield _Suspect("RED-1", f"the sum was reduced twice ({count} times too large)", count * total + residual)


def _residual(ranks: list[_Rank], total: Tensor, residual: Tensor) -> Iterator[_Suspect]:
    yield _Suspect("RED-3", "the residual was left out", total)
    yield _Suspect("RED-3", "the residual was added twice", total + 2 * residual)
    if len(ranks) > 2:
        times = len(ranks)
        yield _Suspect("RED-3", f"the residual was added {times} times, once a rank", total + times * residual)


def _leak(ranks: list[_Rank]) -> Cause:
    """A result that is not finite although every referenced operand is."""
    if any(not bool(rank.present.all()) for rank in ranks):
        return Cause("MAP-4", "a slot of -1 let its NaN weight, or a row that it does not name, reach the result")
    return Cause("ROWS-2", "a row that no map entry names reached the result")
