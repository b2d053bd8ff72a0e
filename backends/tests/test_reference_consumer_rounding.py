"""Inputs on which the rounding profiles and scale placements differ: each must give its own bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_backends.reference.consumer import PROFILE_A, PROFILE_B, PROFILE_C, ReferenceConsumer
from moe_backends.reference.local_sum import local_sum
from moe_contract import (
    ConsumerDeclaration,
    MoEOutput,
    RoundingProfile,
    ScalePlacement,
    TailCapacity,
    UnfinalizedMoEOutput,
)

from .thread_group import ThreadGroup, run_ranks, thread_groups

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
SIGNIFICAND_BITS = {torch.bfloat16: 8, torch.float16: 11}
A, B, C, D = RoundingProfile
WIDTH = 16


def large_number(dtype: torch.dtype) -> float:
    """The power of two whose neighbours above are 2 apart: adding less than 1 rounds away."""
    return 2.0 ** SIGNIFICAND_BITS[dtype]


def test_each_reference_declares_its_profile() -> None:
    """The three built-in consumers are named and declared as documented, fp32 weights included."""
    declared = {d.name: (d.profile, d.scale_placement) for d in (PROFILE_A, PROFILE_B, PROFILE_C)}
    assert declared == {
        "reference-a": (A, ScalePlacement.SUM),
        "reference-b": (B, ScalePlacement.SUM),
        "reference": (C, ScalePlacement.SUM),
    }


def one_token(
    rows: list[float],
    weights: list[float],
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None = None,
    shared: float | None = None,
    scale: float = 1.0,
) -> MoEOutput:
    """One token, one slot per row; every row is constant."""
    top_k = len(rows)
    gemm2 = torch.tensor(rows).to(dtype)[:, None].expand(top_k, WIDTH).contiguous()
    index_map = torch.arange(top_k, dtype=torch.int32)[None]
    triple = UnfinalizedMoEOutput(gemm2, torch.tensor([weights]).to(weights_dtype or dtype), index_map)
    return MoEOutput(triple, None if shared is None else torch.full((1, WIDTH), shared, dtype=dtype), scale)


def value(tensor: Tensor) -> float:
    """The one value that all elements have."""
    assert (tensor == tensor[0, 0]).all()
    return float(tensor[0, 0])


@DTYPES
@pytest.mark.parametrize(("profile", "gained"), [(A, 0.0), (B, 2.0), (C, 2.0), (D, 2.0)])
def test_terms_below_half_an_ulp_add_up_only_in_fp32(
    dtype: torch.dtype, profile: RoundingProfile, gained: float
) -> None:
    """One large term and four of a quarter ulp: profile A loses each, a float32 sum keeps them."""
    large = large_number(dtype)
    output = one_token([large, 0.5, 0.5, 0.5, 0.5], [1.0] * 5, dtype)
    assert value(local_sum(output, profile)) == large + gained


@DTYPES
@pytest.mark.parametrize(("profile", "left"), [(A, 0.0), (B, 1.0), (C, 1.0)])
def test_products_are_rounded_only_in_profile_a(dtype: torch.dtype, profile: RoundingProfile, left: float) -> None:
    """(1 + u)^2 - (1 + 2u): profile A has rounded u^2 away before it adds, in either order of the slots."""
    u = 2.0 ** (1 - SIGNIFICAND_BITS[dtype])
    for order in (1, -1):
        output = one_token([1.0 + u, -(1.0 + 2 * u)][::order], [1.0 + u, 1.0][::order], dtype)
        assert value(local_sum(output, profile)) == left * u * u


@DTYPES
@pytest.mark.parametrize(("profile", "gained"), [(A, 0.0), (B, 2.0), (C, 2.0)])
def test_shared_output_is_added_before_the_publishing_rounding(
    dtype: torch.dtype, profile: RoundingProfile, gained: float
) -> None:
    """A routed rest of 0.5 and a shared 0.75 together pass half an ulp; profile A rounds each away."""
    large = large_number(dtype)
    output = one_token([large, 0.5], [1.0, 1.0], dtype, shared=0.75)
    assert value(local_sum(output, profile)) == large + gained


@DTYPES
@pytest.mark.parametrize(("profile", "expected"), [(A, 0.0), (B, 1.0), (C, 1.0)])
def test_scale_acts_on_the_rounded_sum_only_in_profile_a(
    dtype: torch.dtype, profile: RoundingProfile, expected: float
) -> None:
    """(large + 1) / 2 - large / 2 with a scale of one half: only the float32 sum still holds the 1."""
    large = large_number(dtype)
    output = one_token([large, 1.0], [1.0, 1.0], dtype, shared=-large / 2, scale=0.5)
    assert value(local_sum(output, profile)) == expected / 2


@DTYPES
@pytest.mark.parametrize(("declaration", "gained"), [(PROFILE_A, 0.0), (PROFILE_B, 0.0), (PROFILE_C, 2.0)])
def test_ranks_below_half_an_ulp_add_up_only_in_profile_c(
    dtype: torch.dtype, declaration: ConsumerDeclaration, gained: float
) -> None:
    """Rank 0 large, three ranks of 0.75: summed with a rounding at each rank they vanish."""
    large = large_number(dtype)
    results = _reduce(declaration, [large, 0.75, 0.75, 0.75], 0.0, dtype)
    assert results == [large + gained] * 4


@DTYPES
@pytest.mark.parametrize(("declaration", "gained"), [(PROFILE_A, 0.0), (PROFILE_B, 0.0), (PROFILE_C, 2.0)])
def test_residual_joins_the_unrounded_sum_only_in_profile_c(
    dtype: torch.dtype, declaration: ConsumerDeclaration, gained: float
) -> None:
    """large + 0.75 from the ranks and 0.75 from the residual pass half an ulp only together."""
    large = large_number(dtype)
    assert _reduce(declaration, [large, 0.75], 0.75, dtype) == [large + gained] * 2


@DTYPES
def test_ranks_are_summed_in_rank_order(dtype: torch.dtype) -> None:
    """With a rounding at each rank, 1 + (large - large) and (1 + large) - large differ; rank order decides."""
    large = large_number(dtype)
    assert _reduce(PROFILE_B, [large, -large, 0.75], 0.0, dtype) == [0.75] * 3
    assert _reduce(PROFILE_B, [0.75, large, -large], 0.0, dtype) == [0.0] * 3


@pytest.mark.parametrize("declaration", [PROFILE_B, PROFILE_C], ids=lambda d: d.name)
def test_contribution_is_published_in_the_activation_dtype(declaration: ConsumerDeclaration) -> None:
    """large + 1 on each of two ranks rounds to large before it travels: the two lost ones do not come back."""
    large = large_number(torch.bfloat16)
    outputs = [one_token([large, 0.75], [1.0, 1.0], torch.bfloat16) for _ in range(2)]
    assert _run(declaration, outputs, 0.0, torch.bfloat16) == [2 * large] * 2


@pytest.mark.parametrize("profile", [B, C])
@pytest.mark.parametrize(("placement", "expected"), [(ScalePlacement.SUM, 0.0), (ScalePlacement.WEIGHTS, 2.0**-22)])
def test_scale_placement_decides_what_a_cancellation_leaves(
    profile: RoundingProfile, placement: ScalePlacement, expected: float
) -> None:
    """(3 - 1 - 1 - 1) s is 0, while 3s - s - s - s keeps the rounding of 3s.

    With s = 1 + 2^-23: fl(3s) = 3 + 2^-21, and the three subtractions leave 2^-22.
    """
    output = one_token([1.0] * 4, [3.0, -1.0, -1.0, -1.0], torch.bfloat16, scale=1.0 + 2.0**-23)
    assert value(local_sum(output, profile, placement)) == expected


@pytest.mark.parametrize("profile", [B, C])
def test_float32_weights_are_not_rounded(profile: RoundingProfile) -> None:
    """A weight of 1 + 2^-12 minus 1 leaves 2^-12; rounded to bfloat16 it would leave 0 (WGT-2)."""
    output = one_token([1.0, -1.0], [1.0 + 2.0**-12, 1.0], torch.bfloat16, torch.float32)
    assert value(local_sum(output, profile)) == 2.0**-12


def _reduce(declaration: ConsumerDeclaration, parts: list[float], residual: float, dtype: torch.dtype) -> list[float]:
    """residual_out per rank for finalized constant contributions."""
    outputs = [MoEOutput(torch.full((1, WIDTH), part, dtype=dtype)) for part in parts]
    return _run(declaration, outputs, residual, dtype)


def _run(
    declaration: ConsumerDeclaration, outputs: list[MoEOutput], residual: float, dtype: torch.dtype
) -> list[float]:
    def body(group: ThreadGroup) -> float:
        tail = ReferenceConsumer(declaration).open(group, TailCapacity(1, WIDTH, 2, dtype))
        result = tail(outputs[group.rank], torch.full((1, WIDTH), residual, dtype=dtype), torch.ones(WIDTH), eps=1e-6)
        return value(result.residual_out)

    return run_ranks(thread_groups(len(outputs)), body)
