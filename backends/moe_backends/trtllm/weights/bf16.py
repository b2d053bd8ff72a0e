"""bfloat16 weights as ``trtllm_bf16_moe`` reads them: rows ordered and shuffled, columns in blocks; and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_contract import ExpertWeights

from .blocks import BLOCK_BYTES, INTERMEDIATE_MULTIPLE, from_blocks, round_up, write_blocks
from .rows import first_gemm_order, inverse, second_gemm_order

HIDDEN_MULTIPLE = 128
"""The kernels' tile along the hidden size; other sizes are padded, and then finalized (ROWS-4)."""


@dataclass(frozen=True)
class Bf16Weights:
    """``gemm1 [E, H' / 64, 1|2 * I', 64]`` and ``gemm2 [E, I' / 64, H', 64]`` bfloat16, sizes padded."""

    gemm1: Tensor
    gemm2: Tensor
    hidden_size: int
    """H', padded."""
    intermediate_size: int
    """I', padded."""


def prepare(weights: ExpertWeights) -> Bf16Weights:
    """The experts of one rank, bfloat16, in the kernels' layout."""
    experts, intermediate, hidden = weights.up.shape
    hidden_size, intermediate_size = round_up(hidden, HIDDEN_MULTIPLE), round_up(intermediate, INTERMEDIATE_MULTIPLE)
    halves = [weights.up] if weights.gate is None else [weights.up, weights.gate]
    rows, gated = len(halves) * intermediate_size, weights.gate is not None
    gemm1 = _blocked_zeros(weights.up, experts, rows, hidden_size)
    places = inverse(first_gemm_order(rows, gated=gated)).to(gemm1.device)
    for half, place in zip(halves, places.split(intermediate_size), strict=True):
        write_blocks(gemm1, half, place[:intermediate])
    gemm2 = _blocked_zeros(weights.up, experts, hidden_size, intermediate_size)
    write_blocks(gemm2, weights.down, inverse(second_gemm_order(hidden_size)).to(gemm2.device)[:hidden])
    return Bf16Weights(gemm1, gemm2, hidden_size, intermediate_size)


def _blocked_zeros(like: Tensor, experts: int, rows: int, columns: int) -> Tensor:
    """Padding is 0 and most of a sharded layer, so only what the layer has is written into it."""
    width = BLOCK_BYTES // like.element_size()
    return torch.zeros(experts, columns // width, rows, width, dtype=torch.bfloat16, device=like.device)


def restore_first(gemm1: Tensor, *, gated: bool) -> tuple[Tensor | None, Tensor]:
    """``(gate, up)``, each ``[E, I', H']``, from what ``prepare`` made of any experts."""
    rows = from_blocks(gemm1)
    plain = rows[:, inverse(first_gemm_order(rows.shape[1], gated=gated)).to(rows.device)]
    if not gated:
        return None, plain
    up, gate = plain.chunk(2, dim=1)
    return gate, up


def restore_second(gemm2: Tensor) -> Tensor:
    """Down ``[E, H', I']`` from what ``prepare`` made of any experts."""
    rows = from_blocks(gemm2)
    return rows[:, inverse(second_gemm_order(rows.shape[1])).to(rows.device)]


def unpadded(weights: Bf16Weights, hidden_size: int, intermediate_size: int, *, gated: bool) -> ExpertWeights:
    """The canonical weights that ``prepare`` was given."""
    gate, up = restore_first(weights.gemm1, gated=gated)
    part = (slice(None), slice(intermediate_size), slice(hidden_size))
    down = restore_second(weights.gemm2)[:, :hidden_size, :intermediate_size]
    return ExpertWeights(up=up[part], down=down, gate=None if gate is None else gate[part])
