"""The values of a tail's inputs, by stratum. Every rank's values differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.cases.case import TailCase
from moe_conformance.truth.bounds import UNIT_ROUNDOFF
from moe_contract.dtypes import torch_dtype

SMALL_SCALE = 0.02
"""Standard deviation of the small stratum: the usual initialisation of a transformer's weights."""
LATTICE_SCALES = (1.0, 1.5, 2.0, 2.5, 5.0)
"""Routed scaling factors that keep lattice sums exact in 8 significant bits."""
ACTIVE_SLOTS = 16
"""Most slots that are not zero in one lattice column: 16 slots x weight 2 x scale 5 + 16 stays within 256 units."""
RESIDUAL_RANGE = 8
"""Lattice residuals are integers of at most this size."""


@dataclass(frozen=True)
class LocalTerms:
    """One rank's terms: ``rows [T, K, H]`` by route, ``weights [T, K]``, ``shared [T, H]``."""

    rows: Tensor
    weights: Tensor
    shared: Tensor


def local_terms(case: TailCase, rank: int, generator: torch.Generator) -> LocalTerms:
    """This rank's rows, weights and shared output before rounding to the case's dtypes."""
    if case.stratum == "lattice":
        return _lattice(case, rank, generator)
    shape = (case.tokens, case.top_k, case.hidden_size)
    rows = torch.randn(shape, generator=generator)
    weights = torch.rand(case.tokens, case.top_k, generator=generator) + 0.05
    weights = weights / weights.sum(-1, keepdim=True)
    shared = torch.randn(case.tokens, case.hidden_size, generator=generator)
    if case.stratum == "small":
        return LocalTerms(SMALL_SCALE * rows, weights, SMALL_SCALE * shared)
    if case.stratum == "cancelling":
        return _cancelling(rows, weights, shared, generator)
    if case.stratum == "dominant":
        return _dominant(rows, case.dtype, shared, generator)
    return LocalTerms(rows, weights, shared)


def residual(case: TailCase, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """``[T, H]`` residual, the same on every rank."""
    if case.stratum == "lattice":
        return torch.randint(-RESIDUAL_RANGE, RESIDUAL_RANGE + 1, shape, generator=generator).float()
    scale = SMALL_SCALE if case.stratum == "small" else 1.0
    return scale * torch.randn(shape, generator=generator)


def _lattice(case: TailCase, rank: int, generator: torch.Generator) -> LocalTerms:
    """Signs times weights 1 and 2, so that every partial sum in any order is exact in 8 significant bits.

    Even columns have one owner: only rank ``(column / 2) mod N`` is not zero there, so that a missing, doubled or
    self-copied rank is told by its columns. In odd columns every rank has one slot.
    """
    if case.scale not in LATTICE_SCALES:
        raise ValueError(f"lattice cases take a scale of {LATTICE_SCALES}, got {case.scale}")
    tokens, top_k, hidden = case.tokens, case.top_k, case.hidden_size
    column = torch.arange(hidden)
    slot = torch.arange(top_k).unsqueeze(1)
    owned = (column % 2 == 0) & (column // 2 % case.ranks == rank)
    # ceil(K / 16) classes of slots take turns over the owned columns.
    turn = (column // (2 * case.ranks) + slot) % -(-top_k // ACTIVE_SLOTS) == 0
    single = (column % 2 == 1) & (slot == (column // 2 + rank) % top_k)
    active = (owned & turn) | single
    signs = 2.0 * torch.randint(0, 2, (tokens, top_k, hidden), generator=generator) - 1.0
    weights = 1.0 + torch.randint(0, 2, (tokens, top_k), generator=generator)
    shared = 2.0 * torch.randint(0, 2, (tokens, hidden), generator=generator) - 1.0
    return LocalTerms(signs * active, weights, shared * (owned | (column % 2 == 1)))


def _cancelling(rows: Tensor, weights: Tensor, shared: Tensor, generator: torch.Generator) -> LocalTerms:
    """Slot 2j + 1 undoes slot 2j up to 2^-7 of it; a last slot without a partner stays small."""
    pairs = rows.shape[1] // 2
    first = rows[:, 0 : 2 * pairs : 2]
    wobble = 1.0 + 2.0**-7 * torch.randn(first.shape, generator=generator)
    rows[:, 1 : 2 * pairs : 2] = -first * wobble
    weights[:, 1 : 2 * pairs : 2] = weights[:, 0 : 2 * pairs : 2]
    rows[:, 2 * pairs :] *= SMALL_SCALE
    return LocalTerms(rows, weights, SMALL_SCALE * shared)


def _dominant(rows: Tensor, dtype: str, shared: Tensor, generator: torch.Generator) -> LocalTerms:
    """Slot 0 is large; each other one is 0.9 of half a unit in its last place, so that rounding per term loses it."""
    tokens, top_k, _ = rows.shape
    large = torch.sign(rows[:, :1]) * (1.0 + 0.5 * torch.rand(rows[:, :1].shape, generator=generator))
    rows[:, :1] = large
    rows[:, 1:] = 0.9 * UNIT_ROUNDOFF[torch_dtype(dtype)] * large
    return LocalTerms(rows, torch.ones(tokens, top_k), SMALL_SCALE * shared)
