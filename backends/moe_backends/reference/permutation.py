"""Where the rows go: grouped by expert in tile-aligned segments, or route-major; everything else is poison."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Permutation:
    """A map from (token, slot) to row.

    Attributes:
        map: ``[T, K]`` int32; the row, or -1 where the slot's expert is not here.
        num_rows: P; larger than every entry.
    """

    map: Tensor
    num_rows: int

    def scatter(self, rows: Tensor) -> Tensor:
        """``rows [R, H]``, one per non-negative map entry in row-major order of the map, to ``[P, H]``.

        Every row that no entry names is NaN, so that a consumer that reads one cannot go unnoticed (ROWS-2).
        """
        placed = torch.full((self.num_rows, rows.shape[1]), torch.nan, dtype=rows.dtype, device=rows.device)
        placed[self.map[self.map >= 0].long()] = rows
        return placed


def expert_major(local_ids: Tensor, num_local_experts: int, tile: int) -> Permutation:
    """Rows grouped by ascending expert, in token order within one; each segment starts at a multiple of ``tile``.

    One whole tile of padding follows the last segment, so that the last row is never a live one and P is at least 1
    even when no slot is local.

    Args:
        local_ids: ``[T, K]`` int64 index of the local expert, negative where the expert is elsewhere.
        num_local_experts: experts on this rank.
        tile: rows of one segment are padded to a multiple of this; 1 for no padding between segments.
    """
    if tile < 1:
        raise ValueError(f"tile must be at least 1, got {tile}")
    routes = local_ids.flatten()
    order = torch.argsort(routes, stable=True)
    order = order[(routes < 0).sum() :]  # absent slots sort first
    experts = routes[order]
    counts = torch.bincount(experts, minlength=num_local_experts)
    padded = (counts + tile - 1) // tile * tile
    shift = (padded - counts).cumsum(0) - (padded - counts)  # padding before each segment
    flat = torch.full_like(routes, -1, dtype=torch.int32)
    flat[order] = (torch.arange(len(order), device=routes.device) + shift[experts]).int()
    return Permutation(flat.view(local_ids.shape), int(padded.sum()) + tile)


def route_major(local_ids: Tensor) -> Permutation:
    """Row ``t * K + k`` is route (t, k): the identity except for -1 (contract 1.1)."""
    identity = torch.arange(local_ids.numel(), dtype=torch.int32, device=local_ids.device).view(local_ids.shape)
    return Permutation(identity.masked_fill(local_ids < 0, -1), local_ids.numel())
