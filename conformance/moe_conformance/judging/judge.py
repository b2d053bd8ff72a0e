"""Comparing a result with the truth: every element, against its own derived bound; no tolerance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.truth.tail_oracle import Truth


@dataclass(frozen=True)
class Place:
    """The first element that is out of bounds, and what stands there."""

    token: int
    column: int
    got: float
    expected: float
    bound: float
    count: int
    """How many elements are out of bounds."""


@dataclass(frozen=True)
class Judgement:
    """``headroom`` = max(error / bound), at most 1 for a correct result; ``worst`` is None then."""

    headroom: float
    worst: Place | None

    @property
    def accepted(self) -> bool:
        """Whether every element is within its bound."""
        return self.worst is None


def bound_ratio(got: Tensor, value: Tensor, bound: Tensor) -> Tensor:
    """Elementwise |got - value| / bound, float64: 0 without an error, whatever the bound, and infinite for a NaN."""
    error = (got.to(torch.float64) - value).abs()
    ratio = torch.where(error == 0, 0.0, error / bound)
    return torch.where(ratio.isnan(), torch.inf, ratio)


def error_ratio(got: Tensor, truth: Truth, *, exact: bool) -> Tensor:
    """``[T, H]`` error / bound. With ``exact`` any difference counts as infinite.

    A result that is not finite where the truth is, and one that is finite where the truth is not (a NaN operand must
    propagate), count as infinite.
    """
    value = got.to(torch.float64)
    ratio = bound_ratio(value, truth.value, torch.zeros_like(truth.bound) if exact else truth.bound)
    finite_got, finite_truth = value.isfinite(), truth.value.isfinite()
    ratio = torch.where(finite_got != finite_truth, torch.inf, ratio)
    return torch.where(~finite_got & ~finite_truth, 0.0, ratio)


def judge(got: Tensor, truth: Truth, *, exact: bool) -> Judgement:
    """Judges one ``[T, H]`` result. ``exact``: the truth is representable and every order of summation gives it."""
    if got.numel() == 0:
        return Judgement(0.0, None)
    ratio = error_ratio(got, truth, exact=exact)
    headroom = float(ratio.max())
    bad = ratio > 1.0
    if not bool(bad.any()):
        return Judgement(headroom, None)
    token, column = divmod(int(bad.reshape(-1).to(torch.uint8).argmax()), got.shape[1])
    place = Place(
        token=token,
        column=column,
        got=float(got[token, column]),
        expected=float(truth.value[token, column]),
        bound=0.0 if exact else float(truth.bound[token, column]),
        count=int(bad.sum()),
    )
    return Judgement(headroom, place)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits (NaN equals the same NaN, -0 is not 0)."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(_bits(a), _bits(b)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
