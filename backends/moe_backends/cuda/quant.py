"""The quantised formats as the kernel numbers them, and their outputs before it has written them."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from moe_contract import QuantFormat, QuantRecipe
from moe_contract.quant import NVFP4_BLOCK, swizzled_scale_shape


class Quant(IntEnum):
    """enum Quant in kernels/params.h."""

    NONE = 0
    FP8_STATIC = 1
    FP8_TOKEN = 2
    NVFP4_LINEAR = 3
    NVFP4_SWIZZLED = 4


def quant_code(recipe: QuantRecipe | None) -> tuple[int, float]:
    """The kernel's number of a format, a plain integer as operator and binding take it, and its scalar argument."""
    if recipe is None:
        return Quant.NONE.value, 1.0
    if recipe.format is QuantFormat.FP8_STATIC:
        return Quant.FP8_STATIC.value, recipe.scale
    if recipe.format is QuantFormat.FP8_PER_TOKEN:
        return Quant.FP8_TOKEN.value, 1.0
    code = Quant.NVFP4_LINEAR if recipe.scale_layout == "linear" else Quant.NVFP4_SWIZZLED
    return code.value, recipe.global_scale


def empty_quantised(residual: Tensor, quant: int) -> tuple[Tensor, Tensor]:
    """Unwritten ``(quant_out, quant_scale)`` for a call whose residual is ``[T, H]``; ``quant`` as in quant_code."""
    tokens, hidden = residual.shape
    if quant in (Quant.FP8_STATIC, Quant.FP8_TOKEN):
        codes = torch.empty_like(residual, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)
        shape: tuple[int, ...] = (1,) if quant == Quant.FP8_STATIC else (tokens, 1)
        return codes, residual.new_empty(shape, dtype=torch.float32)
    codes = residual.new_empty((tokens, hidden // 2), dtype=torch.uint8)
    linear = (tokens, hidden // NVFP4_BLOCK)
    shape = linear if quant == Quant.NVFP4_LINEAR else swizzled_scale_shape(tokens, hidden)
    return codes, residual.new_empty(shape, dtype=torch.uint8)
