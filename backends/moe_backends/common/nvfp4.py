"""NVFP4 codes and block scales, element for element as moe_contract.quant defines them, and the tiles they lie in."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_contract.quant import FP4_MAX, FP8_MAX, NVFP4_BLOCK, swizzled_scale_shape

_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of float4_e2m1 by code (OCP MX specification); bit 3 of a code is the sign."""
_TILE_ROWS, _TILE_LANES, _TILE_COLUMNS = 128, 32, 4
"""The block-scale tile of tensor cores: 128 x 4 scales, stored lane by lane with the four row quarters together."""


def nvfp4_linear(values: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Packed codes ``[..., n / 2]`` and linear block scales ``[..., n / 16]``, both uint8, of float32 ``[..., n]``.

    ``global_scale`` float32 has one value for each row or for all: its shape broadcasts against ``values[..., 0]``.
    """
    blocks = values.unflatten(-1, (-1, NVFP4_BLOCK))
    amax = blocks.abs().amax(dim=-1)
    wide = global_scale.unsqueeze(-1).expand_as(amax)
    scales = (wide * divide(amax, FP4_MAX)).clamp(0.0, FP8_MAX).to(torch.float8_e4m3fn)
    block_scale = scales.float().unsqueeze(-1)
    # Where the scale is 0 the quotient is Inf or NaN; it is replaced after, not multiplied away.
    codes = to_e2m1_codes(blocks * (wide.unsqueeze(-1) / block_scale))
    codes = torch.where(block_scale == 0, 0, codes).to(torch.uint8).flatten(-2).unflatten(-1, (-1, 2))
    return codes[..., 0] | (codes[..., 1] << 4), scales.view(torch.uint8)


def nvfp4_values(packed: Tensor, scales: Tensor) -> Tensor:
    """float32 ``[..., n]``: code times block scale, of linear uint8 ``[..., n / 2]`` and ``[..., n / 16]``.

    The global scale is left to the caller, as a GEMM applies it to its sum.
    """
    values = torch.tensor(_E2M1_VALUES + tuple(-v for v in _E2M1_VALUES), device=packed.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)
    codes = pairs.index_select(0, packed.flatten().int()).view(*scales.shape, NVFP4_BLOCK)
    scaled: Tensor = codes.mul_(scales.view(torch.float8_e4m3fn).float().unsqueeze(-1))
    return scaled.flatten(-2)


def to_e2m1_codes(values: Tensor) -> Tensor:
    """float32 to 4-bit float4_e2m1 codes as uint8: nearest even, saturating, sign kept on zero, NaN to +6.

    NaN has no code; +6 is what the conversion instruction gives (PTX cvt.rn.satfinite), and the block scale of a
    block that holds one is NaN anyway.
    """
    magnitude = values.abs()
    # Three ranges of even spacing: 1/2 below 2, 1 below 4, 2 above, whose codes are steps from 0, 4 and 6 on. Past its
    # range each line runs above the next, so the least is the right one; rounding to even is rounding to even codes.
    fine = (magnitude * 2.0).round_()
    middle = magnitude.round().add_(2.0)
    coarse = (magnitude * 0.5).round_().add_(4.0)
    code = torch.minimum(torch.minimum(fine, middle, out=fine), coarse, out=fine).clamp_(max=7.0)
    negative = torch.signbit(values) & ~values.isnan()
    return code.nan_to_num_(nan=7.0).to(torch.uint8).bitwise_or_(negative.to(torch.uint8) << 3)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Linear block scales ``[T, H / 16]`` to the zero-padded 128 x 4 tile layout."""
    num_tokens, blocks = scales.shape
    rows, columns = swizzled_scale_shape(num_tokens, blocks * NVFP4_BLOCK)
    padded = scales.new_zeros(rows, columns)
    padded[:num_tokens, :blocks] = scales
    quarters = _TILE_ROWS // _TILE_LANES
    tiles = padded.view(rows // _TILE_ROWS, quarters, _TILE_LANES, columns // _TILE_COLUMNS, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)


def unswizzle_scales(swizzled: Tensor, num_tokens: int, hidden_size: int) -> Tensor:
    """The inverse of ``swizzle_scales``: the linear ``[T, H / 16]``, padding dropped."""
    rows, columns = swizzled_scale_shape(num_tokens, hidden_size)
    quarters = _TILE_ROWS // _TILE_LANES
    tiles = swizzled.view(rows // _TILE_ROWS, columns // _TILE_COLUMNS, _TILE_LANES, quarters, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows, columns)[:num_tokens, : hidden_size // NVFP4_BLOCK].contiguous()


def divide(values: Tensor, divisor: float) -> Tensor:
    """IEEE division. By a Python number torch multiplies with the reciprocal on CUDA, an ulp off at times."""
    return values / torch.full_like(values, divisor)
