"""Bounds hold where terms underflow: each underflow before the scale is multiplied by it."""

from __future__ import annotations

import pytest
import torch

from moe_backends.reference.local_sum import local_sum
from moe_conformance import bounds
from moe_conformance.oracle import local_part
from moe_contract import MoEOutput, RoundingProfile, ScalePlacement, UnfinalizedMoEOutput

TOP_K, WIDTH = 8, 64
PROFILES = (RoundingProfile.STEP_ROUNDED, RoundingProfile.LOCAL_FP32, RoundingProfile.FP32)


def _output(rows: torch.Tensor, weights: torch.Tensor, scale: float) -> MoEOutput:
    index = torch.arange(TOP_K, dtype=torch.int32).unsqueeze(0)
    return MoEOutput(UnfinalizedMoEOutput(rows, weights, index), None, scale)


def _ratio(output: MoEOutput, profile: RoundingProfile, placement: ScalePlacement) -> float:
    """The largest error / bound of the reference's local sum."""
    part = local_part(output)
    got = local_sum(output, profile, placement)
    scale = output.routed_scaling_factor
    bound = bounds.local_sum(part.value, part.magnitude, part.roundings, got.dtype, profile, placement, scale=scale)
    return float(((got.double() - part.value).abs() / bound).max())


@pytest.mark.parametrize("placement", list(ScalePlacement))
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("scale", [0.25, 1.0, 2.0, 2.827, 5.0, 40.0])
def test_terms_that_underflow_stay_within_the_bound(
    scale: float, profile: RoundingProfile, placement: ScalePlacement
) -> None:
    """Products just below half the smallest float16, all lost, and products of random sizes around it."""
    generator = torch.Generator().manual_seed(3)
    lost = torch.full((TOP_K, WIDTH), 2.0**-13), torch.full((1, TOP_K), 0.999 * 2.0**-12)
    mixed = (
        2.0**-12 * torch.randn(TOP_K, WIDTH, generator=generator),
        2.0**-11 * torch.rand(1, TOP_K, generator=generator),
    )
    for rows, weights in (lost, mixed):
        assert _ratio(_output(rows.half(), weights.half(), scale), profile, placement) <= 1.0


def test_underflow_bound_is_no_wider_than_its_derivation() -> None:
    """Eight lost products of almost eta each, times 5, leave less than a third of the bound unused."""
    rows, weights = torch.full((TOP_K, WIDTH), 2.0**-13), torch.full((1, TOP_K), 0.999 * 2.0**-12)
    output = _output(rows.half(), weights.half(), 5.0)
    assert _ratio(output, RoundingProfile.STEP_ROUNDED, ScalePlacement.SUM) > 0.67
