"""bfloat16 weights as ``trtllm_bf16_moe`` reads them: rows ordered and shuffled, columns in blocks; and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_contract import ExpertWeights

from .blocks import BLOCK_BYTES, INTERMEDIATE_MULTIPLE, from_blocks, padded, round_up, to_blocks
from .rows import first_gemm_order, inverse, second_gemm_order

ELEMENTS_AT_ONCE = 2**22
"""Elements that are laid out in one go, so that no second padded copy of a whole layer exists."""
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
    _, intermediate, hidden = weights.up.shape
    hidden_size, intermediate_size = round_up(hidden, HIDDEN_MULTIPLE), round_up(intermediate, INTERMEDIATE_MULTIPLE)
    gated, experts = weights.gate is not None, weights.up.shape[0]
    rows = 2 * intermediate_size if gated else intermediate_size
    device = weights.up.device
    width = BLOCK_BYTES // weights.up.element_size()
    gemm1 = torch.empty(experts, hidden_size // width, rows, width, dtype=torch.bfloat16, device=device)
    gemm2 = torch.empty(experts, intermediate_size // width, hidden_size, width, dtype=torch.bfloat16, device=device)
    first_order = first_gemm_order(rows, gated=gated).to(device)
    second_order = second_gemm_order(hidden_size).to(device)
    at_once = max(1, ELEMENTS_AT_ONCE // (rows * hidden_size))
    for start in range(0, experts, at_once):
        part = slice(start, start + at_once)
        first, second = padded(weights.select(part), hidden_size, intermediate_size)
        gemm1[part], gemm2[part] = to_blocks(first[:, first_order]), to_blocks(second[:, second_order])
    return Bf16Weights(gemm1, gemm2, hidden_size, intermediate_size)


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
