"""The order of a weight matrix's rows: pairs of gate and up, then the order in which tensor cores deliver them."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

EPILOGUE_TILE = 128
"""Rows that one epilogue step of the TRTLLM-Gen kernels writes: ``epilogue_tile_m`` of FlashInfer's own preparation of
bfloat16 and NVFP4 weights. It decides SHUFFLE_ROWS."""
SHUFFLE_ROWS = 32
"""Rows are shuffled within blocks of this size where the epilogue tile is 128."""
LANES = 8
"""Row ``4 l + q`` of a block goes to place ``8 q + l``: each of eight lanes holds four neighbouring rows."""


@lru_cache(maxsize=64)
def pair_order(rows: int) -> Tensor:
    """``[rows]`` int64: from ``[up; gate]`` to up 0, gate 0, up 1, gate 1, ...; entry i is the source of row i."""
    if rows % 2:
        raise ValueError(f"a gated projection has as many up as gate rows, got {rows} in all")
    return torch.arange(rows).view(2, rows // 2).T.reshape(-1)


@lru_cache(maxsize=64)
def shuffle_order(rows: int) -> Tensor:
    """``[rows]`` int64: the source of each row after the shuffle within blocks of 32."""
    if rows % SHUFFLE_ROWS:
        raise ValueError(f"shuffled weights need a multiple of {SHUFFLE_ROWS} rows, got {rows}")
    block = torch.arange(SHUFFLE_ROWS).view(LANES, SHUFFLE_ROWS // LANES).T.reshape(-1)
    return (torch.arange(0, rows, SHUFFLE_ROWS).unsqueeze(1) + block).reshape(-1)


def first_gemm_order(rows: int, *, gated: bool) -> Tensor:
    """The source of each row of a prepared first projection, from ``[up; gate]`` or from up alone."""
    shuffled = shuffle_order(rows)
    return pair_order(rows)[shuffled] if gated else shuffled


def second_gemm_order(rows: int) -> Tensor:
    """The source of each row of a prepared down projection."""
    return shuffle_order(rows)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``."""
    undone = torch.empty_like(order)
    undone[order] = torch.arange(len(order), device=order.device)
    return undone
