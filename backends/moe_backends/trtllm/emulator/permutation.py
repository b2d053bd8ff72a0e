"""Where the kernels put the rows: tiles, padded counts, and an order within a segment that nobody promises."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_backends.trtllm.returns import Entry
from moe_backends.trtllm.versions import Version

TILES = {False: (8, 16, 32, 64, 128), True: (8, 16, 32, 64, 128, 256)}
"""Tokens of a tile, by whether the entry point is NVFP4 with quantised activations."""
FLOOR_BITS = 2**20
"""The tensor memory accelerator wants 128 KiB mapped behind a buffer: so many bits of rows at least."""
ROW_BITS = 16
BF16_FLOOR_SINCE = Version(0, 6, 18)
"""The bfloat16 launcher has the floor since 0.6.18, the NVFP4 one had it before."""


def default_tile(num_tokens: int, top_k: int, num_local_experts: int, *, fp4: bool) -> int:
    """The untuned tile: the smallest candidate around the power of two above the mean tokens of an expert."""
    tiles = TILES[fp4]
    mean = num_tokens * top_k / num_local_experts
    centre = next((tile for tile in tiles if tile >= mean), tiles[-1])
    return tiles[max(tiles.index(centre) - 1, 0)]


def padded_rows(num_tokens: int, top_k: int, num_experts: int, tile: int) -> int:
    """The most rows that any routing can need; ``num_experts`` is the global count, even under expert parallelism."""
    routes = num_tokens * top_k
    single = min(num_experts, routes)
    return tile * (single + (routes - single) // tile)


def allocated_rows(rows: int, hidden_size: int, entry: Entry, version: Version) -> int:
    """Rows of the buffer, at least those that fill the floor."""
    if not entry.fp4 and version < BF16_FLOOR_SINCE:
        return rows
    return max(rows, -(-FLOOR_BITS // (ROW_BITS * hidden_size)))


def place(local_ids: Tensor, num_local_experts: int, tile: int, generator: torch.Generator) -> Tensor:
    """The flat map: segments by expert, each from a multiple of ``tile``, routes within one in random order.

    ``local_ids [T, K]`` int64, negative where the expert is elsewhere.
    """
    routes = local_ids.flatten().cpu()
    shuffled = torch.randperm(len(routes), generator=generator)
    order = shuffled[torch.argsort(routes[shuffled], stable=True)]
    order = order[int((routes < 0).sum()) :]
    experts = routes[order]
    counts = torch.bincount(experts, minlength=num_local_experts)
    padded = -(-counts // tile) * tile
    gaps = (padded - counts).cumsum(0) - (padded - counts)
    index = torch.full((len(routes),), -1, dtype=torch.int32)
    index[order] = (torch.arange(len(order)) + gaps[experts]).int()
    return index.to(local_ids.device)
