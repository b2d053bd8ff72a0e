"""The recipes of the three quantised outputs (QUANT-1): formats, constants and layouts, no kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor

FP8_MAX = 448.0
"""Largest finite value of float8_e4m3fn (OCP OFP8 specification)."""
FP4_MAX = 6.0
"""Largest value of float4_e2m1 (OCP MX specification)."""
NVFP4_BLOCK = 16
"""Elements that share one block scale in NVFP4."""
FP8_TOKEN_MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
"""Smallest per-token scale, so that an all-zero token divides by no zero; the floor that vLLM's kernel uses."""


class QuantFormat(StrEnum):
    """A quantised form of ``norm_out``; always of the *rounded* norm, in the activation dtype."""

    FP8_STATIC = "fp8-static"
    """``q = e4m3(clamp(float32(norm) * (1 / scale), -448, 448))``; ``scale`` is given, ``1 / scale`` is rounded to
    float32 once. ``quant_out [T, H]`` float8_e4m3fn; ``quant_scale`` is the scale as a float32 tensor of shape [1]."""
    FP8_PER_TOKEN = "fp8-per-token"
    """``scale[t] = max(amax |norm[t]| / 448, FP8_TOKEN_MIN_SCALE)`` in float32;
    ``q = e4m3(clamp(float32(norm) / scale[t], -448, 448))``. ``quant_scale [T, 1]`` float32."""
    NVFP4 = "nvfp4"
    """Blocks of 16 along H. ``sf = e4m3(clamp(global_scale * (amax / 6), 0, 448))``;
    ``q = e2m1(float32(norm) * (global_scale / float32(sf)))``, saturating, 0 where sf is 0.
    ``quant_out [T, H / 2]`` uint8, element 2i in the low nibble; ``quant_scale`` float8_e4m3fn bytes as uint8."""


ScaleLayout = Literal["linear", "swizzled"]
"""NVFP4 block scales: ``linear`` is ``[T, H / 16]``; ``swizzled`` is the 128 x 4 tile layout that tensor cores read,
``[round_up(T, 128), round_up(H / 16, 4)]`` where the scale of (row m, block k) is at byte
``((m // 128) * (C / 4) + k // 4) * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + k % 4`` with C the padded columns.
Every byte outside [T, H / 16] is 0."""


@dataclass(frozen=True)
class QuantRecipe:
    """Which quantised output a tail call writes, and with which scales.

    Attributes:
        format: the format.
        scale: FP8_STATIC only: the dequantisation scale, ``value = scale * q``.
        global_scale: NVFP4 only: the float32 factor of the block scales, ``value = sf * q / global_scale``.
        scale_layout: NVFP4 only.
    """

    format: QuantFormat
    scale: float = 1.0
    global_scale: float = 1.0
    scale_layout: ScaleLayout = "swizzled"


def swizzled_scale_shape(num_tokens: int, hidden_size: int) -> tuple[int, int]:
    """Padded ``(rows, columns)`` of NVFP4 block scales in the swizzled layout."""
    blocks = -(-hidden_size // NVFP4_BLOCK)
    return -(-num_tokens // 128) * 128, -(-blocks // 4) * 4


def swizzled_scale_offset(row: int, block: int, padded_columns: int) -> int:
    """Byte offset of one block's scale in the swizzled layout (see ``ScaleLayout``)."""
    tile = (row // 128) * (padded_columns // 4) + block // 4
    return tile * 512 + (row % 32) * 16 + (row % 128 // 32) * 4 + block % 4


NVFP4_TIE_BREAK = 1.0 + 2.0**-12
"""Factor of every global scale below. Without it 16-bit values often lie exactly between two codes, where float32
arithmetic decides; with it none is nearer than 2^-12 of itself, so that every implementation gives the same codes."""
NVFP4_HIDDEN_SCALE = FP4_MAX * 2.0**5 * NVFP4_TIE_BREAK
"""Global scale of the hidden states that NVFP4 experts are given: values up to 14 keep their size.

Six times a power of two: a block whose largest magnitude is a power of two then has that power as its block scale."""
NVFP4_INTERMEDIATE_SCALE = FP4_MAX * 2.0**2 * NVFP4_TIE_BREAK
"""Global scale of the activation's result before the second GEMM: values up to 112 keep their size."""


def nvfp4_weight_scale(amax: Tensor) -> Tensor:
    """Global scale of a matrix whose largest magnitude is ``amax`` (any shape, float32 is returned).

    6 * 2^k * NVFP4_TIE_BREAK, with k as large as keeps every block scale within float8_e4m3fn. One for each expert's
    gate and up together, one for its down; of the rank's own part, since a checkpoint may be sharded before it is
    quantised. An all-zero matrix has the scale of one whose largest magnitude is 448.
    """
    safe = torch.where(amax > 0, amax.float(), FP8_MAX)
    # frexp: 448 / amax = m * 2^e with m in [0.5, 1), so that 2^(e - 1) is the largest power of two that is not above.
    _, exponent = torch.frexp(FP8_MAX / safe)
    return torch.ldexp(torch.full_like(safe, FP4_MAX * NVFP4_TIE_BREAK), exponent - 1)
