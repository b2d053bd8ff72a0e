"""Bounds hold where terms underflow: each underflow before the scale is multiplied by it."""

from __future__ import annotations

import pytest
import torch

from moe_conformance.harness.threads import run_ranks
from moe_conformance.truth import bounds
from moe_conformance.truth.tail_oracle import local_part
from moe_contract import MoEOutput, RoundingProfile, ScalePlacement, TailCapacity, UnfinalizedMoEOutput
from moe_contract.discovery import load_consumer

TOP_K, WIDTH = 8, 64
PROFILES = (RoundingProfile.STEP_ROUNDED, RoundingProfile.LOCAL_FP32, RoundingProfile.FP32)


def _output(rows: torch.Tensor, weights: torch.Tensor, scale: float) -> MoEOutput:
    index = torch.arange(TOP_K, dtype=torch.int32).unsqueeze(0)
    return MoEOutput(UnfinalizedMoEOutput(rows, weights, index), None, scale)


def _local_sum(output: MoEOutput, profile: RoundingProfile, placement: ScalePlacement) -> torch.Tensor:
    """What the reference publishes: its ``residual_out`` at one rank and a residual of 0, which adds no rounding."""
    reference = load_consumer("reference")
    declared = reference.declaration.model_copy(update={"profile": profile, "scale_placement": placement})
    consumer = type(reference)(declared)
    rows = output.routed.gemm2_permuted
    capacity = TailCapacity(1, WIDTH, TOP_K, rows.dtype)
    zeros, ones = torch.zeros(1, WIDTH, dtype=rows.dtype), torch.ones(WIDTH, dtype=rows.dtype)
    call = run_ranks(lambda group: consumer.open(group, capacity)(output, zeros, ones, eps=1e-6), 1)
    return call[0].residual_out


def _ratio(output: MoEOutput, profile: RoundingProfile, placement: ScalePlacement) -> float:
    """The largest error / bound of the reference's local sum."""
    part = local_part(output)
    got = _local_sum(output, profile, placement)
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
