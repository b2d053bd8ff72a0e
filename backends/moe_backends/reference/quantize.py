"""Quantised outputs of the rounded norm, element for element as moe_contract.quant defines them (QUANT-1)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_backends.common.nvfp4 import divide, nvfp4_linear, swizzle_scales
from moe_contract.quant import FP8_MAX, FP8_TOKEN_MIN_SCALE, NVFP4_BLOCK, QuantFormat, QuantRecipe


def quantize(norm_out: Tensor, recipe: QuantRecipe) -> tuple[Tensor, Tensor]:
    """``(quant_out, quant_scale)`` of ``norm_out [T, H]``; shapes and dtypes as the recipe's format says.

    Raises:
        ValueError: NVFP4 of a width that is not a multiple of 16.
    """
    if recipe.format is QuantFormat.FP8_STATIC:
        return _fp8_static(norm_out, recipe.scale)
    if recipe.format is QuantFormat.FP8_PER_TOKEN:
        return _fp8_per_token(norm_out)
    return _nvfp4(norm_out, recipe)


def to_e4m3(values: Tensor) -> Tensor:
    """float32 to float8_e4m3fn: nearest even, saturating. Past the range the cast alone may give NaN."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _fp8_static(norm_out: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    quant_scale = torch.full((1,), scale, dtype=torch.float32, device=norm_out.device)
    inverse = torch.ones_like(quant_scale) / quant_scale
    return to_e4m3(norm_out.float() * inverse), quant_scale


def _fp8_per_token(norm_out: Tensor) -> tuple[Tensor, Tensor]:
    values = norm_out.float()
    amax = values.abs().amax(dim=1, keepdim=True)
    scale = divide(amax, FP8_MAX).clamp(min=FP8_TOKEN_MIN_SCALE)
    return to_e4m3(values / scale), scale


def _nvfp4(norm_out: Tensor, recipe: QuantRecipe) -> tuple[Tensor, Tensor]:
    hidden_size = norm_out.shape[1]
    if hidden_size % NVFP4_BLOCK:
        raise ValueError(
            f"QUANT-1: NVFP4 needs a hidden size that is a multiple of {NVFP4_BLOCK}, got {hidden_size}; "
            "use another quantised format for this layer"
        )
    packed, scale_bytes = nvfp4_linear(norm_out.float(), torch.full((), recipe.global_scale, device=norm_out.device))
    return packed, swizzle_scales(scale_bytes) if recipe.scale_layout == "swizzled" else scale_bytes
