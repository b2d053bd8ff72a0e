"""From a wrong value to its cause: the known kind of fault that would have given it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_conformance.cases.tail_data import TailInputs
from moe_conformance.judging.judge import Place, judge
from moe_conformance.judging.suspects import RankPart, Suspect, rank_part, suspects
from moe_conformance.truth.bounds import UNIT_ROUNDOFF
from moe_conformance.truth.tail_oracle import Truth, residual_truth
from moe_contract import ConsumerDeclaration, RoundingProfile

SLACK = 4.0
"""A wrong result is compared with what a fault would have given to within this many bounds: the bound is the right
result's, and a fault that multiplies terms multiplies their rounding errors too."""


@dataclass(frozen=True)
class Cause:
    """A fault that gives exactly the wrong values that were seen: the clause it breaks and a sentence."""

    clause: str
    sentence: str


def diagnose(inputs: TailInputs, got: Tensor, truth: Truth, place: Place, rank: int) -> Cause | None:
    """The known fault that explains the whole wrong row of ``residual_out`` at ``place``; None when none does."""
    ranks = [rank_part(output, place.token) for output in inputs.outputs]
    residual = inputs.residual[place.token].double()
    row = got[place.token].double()
    expected, bound = truth.value[place.token], truth.bound[place.token]
    best: tuple[float, Suspect] | None = None
    for suspect in suspects(ranks, residual, rank):
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


def _leak(ranks: list[RankPart]) -> Cause:
    """A result that is not finite although every referenced operand is."""
    if any(not bool(rank.present.all()) for rank in ranks):
        return Cause("MAP-4", "a slot of -1 let its NaN weight, or a row that it does not name, reach the result")
    return Cause("ROWS-2", "a row that no map entry names reached the result")
