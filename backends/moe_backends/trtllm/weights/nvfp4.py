"""NVFP4 weights as ``trtllm_fp4_block_scale_moe`` reads them: codes, swizzled block scales, output scales; and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_backends.common.nvfp4 import nvfp4_linear, nvfp4_values, swizzle_scales, unswizzle_scales
from moe_contract import ExpertWeights
from moe_contract.quant import (
    NVFP4_BLOCK,
    NVFP4_HIDDEN_SCALE,
    NVFP4_INTERMEDIATE_SCALE,
    nvfp4_weight_scale,
)

from .blocks import INTERMEDIATE_MULTIPLE, round_up
from .rows import first_gemm_order, inverse, second_gemm_order

HIDDEN_MULTIPLE = 256
"""The kernels' tile along the hidden size: two epilogue tiles; other sizes are padded, and then finalized (ROWS-4)."""
ELEMENTS_AT_ONCE = 2**17
"""Elements that are quantised in one go: their float32 temporaries stay in a processor's cache."""
Codes = tuple[Tensor, Tensor]
"""Packed codes ``[E, M, K / 2]`` and linear block scales ``[E, M, K / 16]``, uint8."""


@dataclass(frozen=True)
class Nvfp4Weights:
    """Codes ``gemm1 [E, 1|2 * I', H' / 2]``, ``gemm2 [E, H', I' / 2]`` uint8, rows ordered and shuffled.

    Block scales are float8_e4m3fn with the shapes of a linear layout and the bytes of the swizzled one; output scales
    are ``[E]`` float32.
    """

    gemm1: Tensor
    gemm1_scale: Tensor
    gemm2: Tensor
    gemm2_scale: Tensor
    output1_scale: Tensor
    """Multiplies the activation's result: to the intermediate's global scale, and by what up still lacks."""
    output1_gate_scale: Tensor
    """Multiplies the accumulator that goes into the activation: undoes the global scales of weights and input."""
    output2_scale: Tensor
    """Undoes the global scales of the second GEMM."""
    hidden_size: int
    intermediate_size: int


def prepare(weights: ExpertWeights) -> Nvfp4Weights:
    """The experts of one rank, quantised as moe_contract.quant says, in the kernels' layout."""
    _, intermediate, hidden = weights.up.shape
    hidden_size, intermediate_size = round_up(hidden, HIDDEN_MULTIPLE), round_up(intermediate, INTERMEDIATE_MULTIPLE)
    gated = weights.gate is not None
    halves = [weights.up] if weights.gate is None else [weights.up, weights.gate]
    first_scale = nvfp4_weight_scale(torch.stack([half.abs().amax((1, 2)).float() for half in halves]).amax(0))
    second_scale = nvfp4_weight_scale(weights.down.abs().amax((1, 2)).float())
    first = [_quantized(half, first_scale) for half in halves]
    order = first_gemm_order(len(halves) * intermediate_size, gated=gated)
    gemm1, gemm1_scale = _laid_out(first, order, intermediate_size, hidden_size)
    second = [_quantized(weights.down, second_scale)]
    gemm2, gemm2_scale = _laid_out(second, second_gemm_order(hidden_size), hidden_size, intermediate_size)
    gate_scale = 1.0 / first_scale * (1.0 / NVFP4_HIDDEN_SCALE)
    # Not gated, the scaled accumulator alone goes through the activation; gated, up is still unscaled after it.
    output1 = NVFP4_INTERMEDIATE_SCALE * gate_scale if gated else torch.full_like(gate_scale, NVFP4_INTERMEDIATE_SCALE)
    output2 = 1.0 / NVFP4_INTERMEDIATE_SCALE * (1.0 / second_scale)
    return Nvfp4Weights(
        gemm1, gemm1_scale, gemm2, gemm2_scale, output1, gate_scale, output2, hidden_size, intermediate_size
    )


def restore(codes: Tensor, scales: Tensor, order: Tensor) -> Codes:
    """Linear codes and scales in canonical row order, from what ``prepare`` made of any experts."""
    undo = inverse(order).to(codes.device)
    return codes[:, undo], linear_scales(scales)[:, undo]


def linear_scales(scales: Tensor) -> Tensor:
    """Block scales ``[E, M, K / 16]`` uint8, linear but in prepared row order, of swizzled ones of this shape."""
    experts, rows, columns = scales.shape
    swizzled = scales.view(torch.uint8).view(experts * rows, columns)
    return unswizzle_scales(swizzled, experts * rows, columns * NVFP4_BLOCK).view(experts, rows, columns)


def values(codes: Codes) -> Tensor:
    """Codes times block scales, float32 ``[E, M, K]``, without the global scale."""
    return nvfp4_values(*codes)


def _quantized(matrix: Tensor, global_scale: Tensor) -> Codes:
    experts, rows, columns = matrix.shape
    width = round_up(columns, NVFP4_BLOCK)
    codes = torch.empty(experts, rows, width // 2, dtype=torch.uint8, device=matrix.device)
    scales = torch.empty(experts, rows, width // NVFP4_BLOCK, dtype=torch.uint8, device=matrix.device)
    flat, flat_codes, flat_scales = (each.flatten(0, 1) for each in (matrix, codes, scales))
    by_row = global_scale.repeat_interleave(rows)
    at_once = max(1, ELEMENTS_AT_ONCE // width)
    for first in range(0, experts * rows, at_once):
        part = slice(first, first + at_once)
        filled = pad(flat[part].float(), (0, width - columns))
        flat_codes[part], flat_scales[part] = nvfp4_linear(filled, by_row[part])
    return codes, scales


def _laid_out(parts: list[Codes], order: Tensor, part_rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Parts below one another, each padded to ``part_rows`` rows, in ``order``; scales swizzled expert by expert.

    Codes and scales of padding are 0, so only those of the parts are moved: a sharded intermediate size is far below
    the multiple. Rows are a multiple of the 128 of a scale tile.
    """
    experts, device, rows = parts[0][0].shape[0], parts[0][0].device, len(order)
    codes = torch.zeros(experts, rows, columns // 2, dtype=torch.uint8, device=device)
    scales = torch.zeros(experts, rows, columns // NVFP4_BLOCK, dtype=torch.uint8, device=device)
    places = inverse(order).to(device)
    for place, (packed, linear) in zip(places.split(part_rows), parts, strict=True):
        where = place[: packed.shape[1]]
        codes[:, :, : packed.shape[2]].index_copy_(1, where, packed)
        scales[:, :, : linear.shape[2]].index_copy_(1, where, linear)
    swizzled = swizzle_scales(scales.view(experts * rows, -1)).view(scales.shape)
    return codes, swizzled.view(torch.float8_e4m3fn)
