"""RMSNorm of the reference: exact where no operation rounds, within the derived bound elsewhere."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_backends.reference.rmsnorm import rms_norm

U32 = 2.0**-24
UNIT_ROUNDOFF = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
ETA = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
UNIT_ROW = [1.5, 1.5, 0.5, 0.5, 0.0, 1.0, 1.0, 1.0]
"""Its mean square is exactly 1."""


def exact_norm(x: Tensor, gamma: Tensor, eps: float, weight_bias: float) -> Tensor:
    """The norm in float64."""
    wide = x.double()
    return wide / (wide.square().mean(dim=1, keepdim=True) + eps).sqrt() * (gamma.double() + weight_bias)


@DTYPES
@pytest.mark.parametrize("weights_dtype", ["activation", "float32"])
@pytest.mark.parametrize("hidden_size", [1, 24, 2880, 7168])
@pytest.mark.parametrize("weight_bias", [0.0, 1.0])
@pytest.mark.parametrize("magnitude", [1.0, 0.02, 1e-4])
def test_norm_is_within_the_derived_bound(
    dtype: torch.dtype, weights_dtype: str, hidden_size: int, weight_bias: float, magnitude: float
) -> None:
    """Every element lies within the bound of docs/numerics.md for RMSNorm of the observed residual."""
    generator = torch.Generator().manual_seed(hidden_size)
    x = (torch.randn(5, hidden_size, generator=generator) * magnitude).to(dtype)
    gamma = torch.randn(hidden_size, generator=generator).to(torch.float32 if weights_dtype == "float32" else dtype)
    got = rms_norm(x, gamma, eps=1e-6, weight_bias=weight_bias)
    assert got.dtype == dtype
    exact = exact_norm(x, gamma, 1e-6, weight_bias)
    # A tree sum over H elements, with up to 64 of them added in series in one lane.
    additions = math.log2(hidden_size) + 64
    rho = additions * U32 / (1 - additions * U32) / 2 + 4 * U32
    # Three roundings of the gain and the two products; for the sum in the gain, one more.
    error = exact.abs() * (rho * (1 + rho) + 4 * U32)
    bound = error + UNIT_ROUNDOFF[dtype] * (exact.abs() + error) + ETA[dtype]
    assert ((got.double() - exact).abs() <= bound).all()


@DTYPES
def test_eps_is_inside_the_root(dtype: torch.dtype) -> None:
    """A mean square of 1 with eps 3 divides by exactly 2."""
    x = torch.tensor([UNIT_ROW], dtype=dtype)
    assert torch.equal(rms_norm(x, torch.ones(8), eps=3.0), x / 2)


@DTYPES
def test_weight_bias_gives_the_one_plus_gamma_form(dtype: torch.dtype) -> None:
    """gamma 1 with bias 1 doubles, gamma -1 with bias 1 gives zero (NORM-2)."""
    x = torch.tensor([UNIT_ROW], dtype=dtype)
    gamma = torch.tensor([1.0, -1.0] * 4, dtype=dtype)
    expected = x * torch.tensor([2.0, 0.0] * 4, dtype=dtype)
    assert torch.equal(rms_norm(x, gamma, eps=0.0, weight_bias=1.0), expected)


def test_gamma_keeps_its_own_dtype() -> None:
    """1.5 x (1 + 2^-8) rounds up to 1.5 + 2^-7; with gamma first rounded to bfloat16 it would stay 1.5 (NORM-1)."""
    x = torch.tensor([UNIT_ROW], dtype=torch.bfloat16)
    assert rms_norm(x, torch.full((8,), 1.0 + 2.0**-8), eps=0.0)[0, 0] == 1.5 + 2.0**-7


def test_gain_is_applied_before_the_only_rounding() -> None:
    """Rounding the normalised value before the gain would show: x r has more bits than bfloat16 keeps."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 64, generator=generator).bfloat16()
    gamma = torch.randn(64, generator=generator)
    exact = exact_norm(x, gamma, 0.0, 0.0)
    root = x.double().square().mean().sqrt()
    rounded_twice = ((x.double() / root).bfloat16().double() * gamma.double()).bfloat16()
    assert torch.equal(rms_norm(x, gamma, eps=0.0), exact.bfloat16())
    assert not torch.equal(rounded_twice, exact.bfloat16()), "the probe does not tell the two apart"


def test_rows_are_independent_and_nan_stays_in_its_row() -> None:
    """A row's bits do not depend on its neighbours."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    alone = rms_norm(x[2:], torch.ones(64), eps=1e-6)
    x[0, 5] = math.nan
    together = rms_norm(x, torch.ones(64), eps=1e-6)
    assert together[0].isnan().all()
    assert torch.equal(together[2:], alone)


def test_no_tokens_give_an_empty_result() -> None:
    """T = 0 divides by nothing."""
    assert rms_norm(torch.empty(0, 8, dtype=torch.float16), torch.ones(8), eps=1e-6).shape == (0, 8)
