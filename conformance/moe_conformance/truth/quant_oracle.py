"""The recipes of the quantised outputs, applied in float64 to the norm that was observed.

A recipe is float32 arithmetic; a code is right when it lies between the codes of the exact quotient a few float32
roundings down and up. Away from the midpoint of two codes that leaves one code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_conformance.truth.bounds import U32
from moe_contract import QuantFormat, QuantRecipe, TailOutput, Violation
from moe_contract.quant import (
    FP4_MAX,
    FP8_MAX,
    FP8_TOKEN_MIN_SCALE,
    NVFP4_BLOCK,
    swizzled_scale_offset,
    swizzled_scale_shape,
)

SLACK = 4.0 * U32
"""Relative error granted to a quotient: reciprocal, two products and the given scale's own rounding."""
Rounding = Callable[[Tensor], Tensor]
E2M1_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
"""Magnitudes of the eight codes of float4_e2m1 (OCP MX specification)."""
_MIDDLES = (E2M1_VALUES[1:] + E2M1_VALUES[:-1]) / 2.0
_E2M1_BORDERS = torch.where(
    torch.arange(len(_MIDDLES)) % 2 == 1, _MIDDLES.nextafter(torch.zeros_like(_MIDDLES)), _MIDDLES
)
"""The largest magnitude that rounds to each code: the middle to the next one, or where that is the even one, the
float64 number below the middle."""


def quant_violation(output: TailOutput, recipe: QuantRecipe, rank: int) -> Violation | None:
    """The first byte or scale that the recipe does not give; None when all are right."""
    if output.quant_out is None or output.quant_scale is None:
        missing = "quant_out" if output.quant_out is None else "quant_scale"
        return _violation(missing, "None", f"the {recipe.format.value} output that was asked for", rank)
    if recipe.format is QuantFormat.NVFP4:
        return _nvfp4(output.norm_out, output.quant_out, output.quant_scale, recipe, rank)
    return _fp8(output.norm_out, output.quant_out, output.quant_scale, recipe, rank)


def _fp8(norm: Tensor, codes: Tensor, scales: Tensor, recipe: QuantRecipe, rank: int) -> Violation | None:
    exact = norm.double()
    if recipe.format is QuantFormat.FP8_STATIC:
        shape: tuple[int, ...] = (1,)
        expected = torch.full(shape, float(torch.tensor(recipe.scale)), dtype=torch.float64)
    else:
        shape = (norm.shape[0], 1)
        expected = (exact.abs().amax(1, keepdim=True) / FP8_MAX).clamp(min=FP8_TOKEN_MIN_SCALE)
    found = _form("quant_scale", scales, shape, torch.float32, rank) or _form(
        "quant_out", codes, tuple(norm.shape), torch.float8_e4m3fn, rank
    )
    if found or not norm.numel():
        return found
    scale_error = (scales.double() - expected).abs() > SLACK * expected
    if bool(scale_error.any()):
        token = int(scale_error.reshape(-1).nonzero()[0])
        got, want = float(scales.reshape(-1)[token]), float(expected.reshape(-1)[token])
        return _violation("quant_scale", f"{got:.9g}", f"{want:.9g}", rank, token=token)
    return _codes(codes.double(), exact / scales.double(), e4m3_value, FP8_MAX, rank)


def _nvfp4(norm: Tensor, packed: Tensor, scales: Tensor, recipe: QuantRecipe, rank: int) -> Violation | None:
    tokens, hidden = norm.shape
    blocks = hidden // NVFP4_BLOCK
    linear = recipe.scale_layout == "linear"
    shape = (tokens, blocks) if linear else swizzled_scale_shape(tokens, hidden)
    found = _form("quant_out", packed, (tokens, hidden // 2), torch.uint8, rank) or _form(
        "quant_scale", scales, shape, torch.uint8, rank
    )
    if found or not norm.numel():
        return found
    observed, padding = (scales, scales.new_empty(0)) if linear else _unswizzled(scales, tokens, blocks)
    if bool(padding.any()):
        return _violation("quant_scale", f"{int(padding.max())} in a padding byte", "0 in every padding byte", rank)
    exact = norm.double().view(tokens, blocks, NVFP4_BLOCK)
    wanted = recipe.global_scale * exact.abs().amax(2) / FP4_MAX
    factors = observed.view(torch.float8_e4m3fn).double()
    wrong = ~_allowed(factors, wanted, e4m3_value, FP8_MAX)
    if bool(wrong.any()):
        token, block = (int(i) for i in wrong.nonzero()[0])
        got, want = float(factors[token, block]), float(wanted[token, block])
        return _violation("quant_scale", f"{got:.6g} for block {block}", f"e4m3 of {want:.6g}", rank, token=token)
    multiplier = torch.where(factors > 0, recipe.global_scale / factors, 0.0).unsqueeze(2)
    return _codes(_unpacked(packed), (exact * multiplier).reshape(tokens, hidden), e2m1_value, FP4_MAX, rank)


def _codes(got: Tensor, quotient: Tensor, rounding: Rounding, largest: float, rank: int) -> Violation | None:
    wrong = ~_allowed(got, quotient, rounding, largest)
    if not bool(wrong.any()):
        return None
    token, column = (int(i) for i in wrong.nonzero()[0])
    value = float(got[token, column])
    found = _violation(
        "quant_out", f"{value:.6g}", f"the code of {float(quotient[token, column]):.6g}", rank, token=token
    )
    return found.model_copy(update={"column": column, "value": value, "count": int(wrong.sum())})


def _allowed(got: Tensor, quotient: Tensor, rounding: Rounding, largest: float) -> Tensor:
    """Whether ``got`` lies between the codes of the quotient a little down and a little up."""
    clamped = quotient.clamp(-largest, largest)
    slack = SLACK * clamped.abs()
    low = rounding((clamped - slack).clamp(-largest, largest))
    high = rounding((clamped + slack).clamp(-largest, largest))
    return (got >= low) & (got <= high)


def e4m3_value(values: Tensor) -> Tensor:
    """To float8_e4m3fn and back; through float32, whose rounding the slack covers."""
    return values.float().to(torch.float8_e4m3fn).double()


def e2m1_value(values: Tensor) -> Tensor:
    """To the nearest e2m1 value, ties to the even code, and back; float64."""
    return torch.copysign(E2M1_VALUES[torch.bucketize(values.abs(), _E2M1_BORDERS)], values)


def _unpacked(packed: Tensor) -> Tensor:
    """``[T, H / 2]`` bytes as ``[T, H]`` float64; element 2i is the low nibble, the sign is bit 3."""
    nibbles = torch.stack([packed & 0xF, packed >> 4], dim=2).reshape(packed.shape[0], -1).long()
    return torch.where(nibbles >= 8, -E2M1_VALUES[nibbles % 8], E2M1_VALUES[nibbles % 8])


def _unswizzled(scales: Tensor, tokens: int, blocks: int) -> tuple[Tensor, Tensor]:
    """The ``[T, H / 16]`` scales of a swizzled buffer, and the bytes that belong to none."""
    columns = scales.shape[1]
    offsets = torch.tensor(
        [[swizzled_scale_offset(row, block, columns) for block in range(blocks)] for row in range(tokens)]
    )
    flat = scales.reshape(-1)
    rest = torch.ones_like(flat, dtype=torch.bool)
    rest[offsets.reshape(-1)] = False
    return flat[offsets], flat[rest]


def _form(field: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> Violation | None:
    if tuple(tensor.shape) == shape and tensor.dtype == dtype:
        return None
    return _violation(field, f"{list(tensor.shape)} {tensor.dtype}", f"{list(shape)} {dtype}", rank)


def _violation(field: str, got: str, expected: str, rank: int, token: int | None = None) -> Violation:
    return Violation(clause="QUANT-1", field=field, got=got, expected=expected, rank=rank, token=token)
