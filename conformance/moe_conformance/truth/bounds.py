"""The derived error bounds. Symbols: u a unit roundoff, gamma(n) = n u32 / (1 - n u32), eta half the least subnormal.

All inputs and results are float64. Source: Higham, Accuracy and Stability of Numerical Algorithms, chapters 3 and 4
(sums and inner products); the stages are those of docs/numerics.md.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_contract.declarations import RoundingProfile, ScalePlacement

EXACT = torch.float64
"""The dtype of every truth and bound: 29 bits more than float32, the widest that is judged."""
U32 = 2.0**-24
"""Unit roundoff of float32."""
UNIT_ROUNDOFF = {torch.float32: U32, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Half the distance from 1 to the next number."""
ETA = {torch.float32: 2.0**-150, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}
"""Half the smallest subnormal: the largest error of a rounding that underflows."""
SERIAL_ADDS = 64
"""A tree sum's lanes add at most this many elements in series first; 64 covers H 8192 on 128 lanes."""


def gamma(n: float) -> float:
    """Relative error of n float32 roundings in a row."""
    return n * U32 / (1.0 - n * U32)


def growth(n: float, dtype: torch.dtype) -> float:
    """Relative error of n roundings to ``dtype``, each after one to float32."""
    return math.pow((1.0 + UNIT_ROUNDOFF[dtype]) * (1.0 + U32), n) - 1.0


def store(value: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """Error after one rounding to ``dtype`` of a value already off by ``error``."""
    return error + UNIT_ROUNDOFF[dtype] * (value.abs() + error) + ETA[dtype]


def local_sum(
    value: Tensor,
    magnitude: Tensor,
    roundings: Tensor,
    dtype: torch.dtype,
    profile: RoundingProfile,
    placement: ScalePlacement,
    *,
    scale: float = 1.0,
) -> Tensor:
    """Error of one rank's published contribution.

    Args:
        value: ``[T, H]`` the exact contribution y.
        magnitude: ``[T, H]`` S = |s| sum |w g| + |shared|.
        roundings: ``[T, 1]`` valid slots, plus 1 for a scale, plus 1 for a shared output.
        dtype: the activation dtype, in which it is published.
        profile: where the consumer rounds.
        placement: where it applies the scale.
        scale: the routed scaling factor s.
    """
    # A rounding that underflows is off by up to eta whatever the value's size, so S says nothing of it. One that comes
    # before the scale is multiplied by it; where the scale is on the weights, or below 1, 1 is at least its factor.
    factor = max(1.0, abs(scale)) if placement is ScalePlacement.SUM else 1.0
    if profile is RoundingProfile.STEP_ROUNDED:
        # Each term is rounded once as a product and once per addition that follows it, and each time to float32 first.
        # Only products can underflow: the sum of two numbers of a format is exact where it is subnormal. There are at
        # most `roundings` of them, the one by the scale included, and later roundings enlarge their errors too.
        steps = roundings + 1
        relative = torch.pow((1.0 + UNIT_ROUNDOFF[dtype]) * (1.0 + U32), steps) - 1.0
        underflow = roundings * factor * (ETA[dtype] + ETA[torch.float32])
        return relative * magnitude + (1.0 + relative) * underflow
    extra = 1.0 if placement is ScalePlacement.WEIGHTS else 0.0
    n = roundings + extra
    return store(value, n * U32 / (1.0 - n * U32) * magnitude + n * factor * ETA[torch.float32], dtype)


def rank_sum(magnitude: Tensor, errors: Tensor, ranks: int, dtype: torch.dtype, profile: RoundingProfile) -> Tensor:
    """Error of the sum over ranks. ``magnitude`` = sum (|y_r| + E_r), ``errors`` = sum E_r."""
    if profile in (RoundingProfile.FP32, RoundingProfile.SWITCH):
        return errors + gamma(ranks - 1) * magnitude
    return errors + growth(ranks - 1, dtype) * magnitude + (ranks - 1) * ETA[dtype]


def residual(value: Tensor, error: Tensor, dtype: torch.dtype) -> Tensor:
    """Error of ``residual_out``: one float32 addition, one rounding to the activation dtype."""
    return store(value, error + U32 * (value.abs() + error), dtype)


def rms_norm(normed: Tensor, hidden_size: int, dtype: torch.dtype) -> Tensor:
    """Error of ``norm_out`` computed from the residual that was observed.

    rho is the relative error of the reciprocal root: half that of the mean square (log2 H levels of a tree over lanes
    of SERIAL_ADDS), and 4 roundings for the division, eps, root and reciprocal. Three more multiply row, root and gain.
    """
    rho = gamma(math.log2(hidden_size) + SERIAL_ADDS) / 2.0 + 4.0 * U32
    error = normed.abs() * (rho * (1.0 + rho) + 3.0 * U32)
    return store(normed, error, dtype)
