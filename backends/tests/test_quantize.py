"""The quantised outputs against the recipe computed one element at a time in plain Python (QUANT-1)."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_backends.common.nvfp4 import nvfp4_values, to_e2m1_codes, unswizzle_scales
from moe_backends.reference.quantize import quantize, to_e4m3
from moe_contract.quant import QuantFormat, QuantRecipe, ScaleLayout, swizzled_scale_offset, swizzled_scale_shape

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = [2.0**-9 * m for m in range(8)] + [
    2.0 ** (e - 7) * (1 + m / 8) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]
"""Non-negative finite values by code: subnormals, then normals; the last code is NaN."""
LAYOUTS: list[ScaleLayout] = ["linear", "swizzled"]
finite_16_bit = st.integers(0, 0xFFFF)


def f32(x: float) -> float:
    """``x`` rounded to float32; past its range to infinity. One operation in double, then this, rounds as float32."""
    try:
        rounded: float = struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)
    return rounded


def nearest_code(magnitude: float, values: list[float]) -> int:
    """The code of the nearest value, ties to the even code, past the end the last."""
    if magnitude >= values[-1]:
        return len(values) - 1
    return min(range(len(values)), key=lambda code: (abs(values[code] - magnitude), code % 2))


def e4m3_byte(x: float) -> int:
    """Saturating float8_e4m3fn."""
    return nearest_code(abs(x), E4M3) | (0x80 if math.copysign(1.0, x) < 0 else 0)


def e2m1_code(x: float) -> int:
    """Saturating float4_e2m1."""
    return nearest_code(abs(x), E2M1) | (0x8 if math.copysign(1.0, x) < 0 else 0)


@st.composite
def norms(draw: st.DrawFn, hidden_multiple: int = 1) -> Tensor:
    """A finite ``[T, H]`` tensor of either 16-bit dtype, any bit patterns, with T from 0."""
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16]))
    shape = draw(st.integers(0, 3)), draw(st.integers(1, 3)) * hidden_multiple
    count = shape[0] * shape[1]
    if draw(st.booleans()):
        patterns = draw(st.lists(finite_16_bit, min_size=count, max_size=count))
        tensor = torch.tensor(patterns, dtype=torch.int32).to(torch.uint16).view(dtype).reshape(shape)
    else:
        values = draw(st.lists(st.integers(-64, 64), min_size=count, max_size=count))
        tensor = (torch.tensor(values, dtype=torch.float32) / 16).to(dtype).reshape(shape)
    return torch.where(tensor.isfinite(), tensor, torch.zeros_like(tensor))


scales = st.floats(2.0**-20, 2.0**12, width=32)
few = settings(max_examples=60, deadline=None)


def dequantize(quant_out: Tensor, quant_scale: Tensor, recipe: QuantRecipe, shape: tuple[int, int]) -> Tensor:
    """The float32 values ``[T, H]`` that a quantised output stands for; ``shape`` is ``(T, H)``."""
    if recipe.format is not QuantFormat.NVFP4:
        return quant_out.float() * quant_scale
    num_tokens, hidden_size = shape
    scales = quant_scale
    if recipe.scale_layout == "swizzled":
        scales = unswizzle_scales(quant_scale, num_tokens, hidden_size)
    return nvfp4_values(quant_out, scales) / recipe.global_scale


@few
@given(norms(), scales)
def test_fp8_static_equals_the_recipe_per_element(norm: Tensor, scale: float) -> None:
    """Multiplication with the rounded reciprocal, clamp, nearest even."""
    quant_out, quant_scale = quantize(norm, QuantRecipe(QuantFormat.FP8_STATIC, scale=scale))
    assert (quant_out.dtype, quant_scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert quant_scale.tolist() == [scale]
    inverse = f32(1.0 / scale)
    expected = [[e4m3_byte(f32(x * inverse)) for x in row] for row in norm.tolist()]
    assert quant_out.view(torch.uint8).tolist() == expected


@few
@given(norms())
def test_fp8_per_token_equals_the_recipe_per_element(norm: Tensor) -> None:
    """The scale is amax / 448 with a floor; elements are divided by it."""
    quant_out, quant_scale = quantize(norm, QuantRecipe(QuantFormat.FP8_PER_TOKEN))
    assert quant_scale.shape == (norm.shape[0], 1) and quant_scale.dtype == torch.float32
    floor = f32(1.0 / (448.0 * 512.0))
    expected_scales = [max(f32(max(abs(x) for x in row) / 448.0), floor) for row in norm.tolist()]
    assert quant_scale.flatten().tolist() == expected_scales
    pairs = zip(norm.tolist(), expected_scales, strict=True)
    assert quant_out.view(torch.uint8).tolist() == [[e4m3_byte(f32(x / s)) for x in row] for row, s in pairs]


@few
@given(norms(hidden_multiple=16), scales, st.sampled_from(LAYOUTS))
def test_nvfp4_equals_the_recipe_per_element(norm: Tensor, global_scale: float, layout: ScaleLayout) -> None:
    """Block scales, their layout with zero padding, codes and their packing, byte for byte."""
    recipe = QuantRecipe(QuantFormat.NVFP4, global_scale=global_scale, scale_layout=layout)
    quant_out, quant_scale = quantize(norm, recipe)
    num_tokens, hidden = norm.shape
    assert quant_out.shape == (num_tokens, hidden // 2)
    padded = swizzled_scale_shape(num_tokens, hidden) if layout == "swizzled" else (num_tokens, hidden // 16)
    assert quant_scale.shape == padded
    assert quant_out.dtype == quant_scale.dtype == torch.uint8
    scale_bytes, expected_scales = quant_scale.flatten().tolist(), [0] * (padded[0] * padded[1])
    for token, row in enumerate(norm.tolist()):
        codes: list[int] = []
        for block in range(hidden // 16):
            values = row[block * 16 : block * 16 + 16]
            byte, block_codes = _nvfp4_block(values, global_scale)
            codes += block_codes
            linear = token * padded[1] + block
            offset = linear if layout == "linear" else swizzled_scale_offset(token, block, padded[1])
            expected_scales[offset] = byte
        packed = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
        assert quant_out[token].tolist() == packed
    assert scale_bytes == expected_scales


def _nvfp4_block(values: list[float], global_scale: float) -> tuple[int, list[int]]:
    """The scale byte and the codes of one block."""
    amax = max(abs(x) for x in values)
    byte = e4m3_byte(min(f32(global_scale * f32(amax / 6.0)), 448.0))
    if byte == 0:
        return 0, [0] * 16
    factor = f32(global_scale / E4M3[byte])
    return byte, [e2m1_code(f32(x * factor)) for x in values]


def test_fp8_static_multiplies_with_the_reciprocal() -> None:
    """0.68359375 / 7 is a tie, while the product with the rounded 1 / 7 is not: the codes differ."""
    x, scale = 0.68359375, 7.0
    expected = e4m3_byte(f32(x * f32(1.0 / scale)))
    assert expected != e4m3_byte(x / scale), "the probe does not tell the two apart"
    quant_out, _ = quantize(torch.tensor([[x]]).bfloat16(), QuantRecipe(QuantFormat.FP8_STATIC, scale=scale))
    assert quant_out.view(torch.uint8).item() == expected


@pytest.mark.parametrize(
    "global_scale",
    [
        float.fromhex("0x1.d24926p-7"),  # fl(g * fl(7 / 6)) and fl(fl(7 g) / 6) lie on either side of a tie
        float.fromhex("0x1.e00002p-1"),  # with a block scale of 1.125, so do fl(3 * fl(g / sf)) and fl(fl(3 g) / sf)
    ],
)
def test_nvfp4_rounds_in_the_order_of_the_recipe(global_scale: float) -> None:
    """A block of 7 and 3 whose code or scale another order of the same operations would change."""
    values = [7.0, 3.0] + [0.0] * 14
    byte, codes = _nvfp4_block(values, global_scale)
    other_byte = e4m3_byte(f32(f32(global_scale * 7.0) / 6.0))
    other_code = e2m1_code(f32(f32(3.0 * global_scale) / E4M3[byte]))
    assert (other_byte, other_code) != (byte, codes[1]), "the probe does not tell the orders apart"
    recipe = QuantRecipe(QuantFormat.NVFP4, global_scale=global_scale, scale_layout="linear")
    quant_out, quant_scale = quantize(torch.tensor([values]).bfloat16(), recipe)
    assert quant_scale.item() == byte
    assert quant_out[0, 0].item() == codes[0] | codes[1] << 4


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 16), (128, 64), (129, 80), (300, 2880)])
def test_swizzled_layout_matches_the_offset_formula(tokens: int, hidden: int) -> None:
    """Every block's scale is where the contract's formula says, and every other byte is 0."""
    norm = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    linear, swizzled = (
        quantize(norm, QuantRecipe(QuantFormat.NVFP4, global_scale=50.0, scale_layout=layout))[1] for layout in LAYOUTS
    )
    rows, columns = swizzled_scale_shape(tokens, hidden)
    expected = torch.zeros(rows * columns, dtype=torch.uint8)
    for token in range(tokens):
        for block in range(hidden // 16):
            expected[swizzled_scale_offset(token, block, columns)] = linear[token, block]
    assert linear.count_nonzero() == linear.numel(), "a zero scale would hide a misplaced one"
    assert torch.equal(swizzled.flatten(), expected)


def test_e4m3_cast_rounds_ties_to_even_and_saturates() -> None:
    """Every value, every midpoint and its neighbours, both signs, and values past the range."""
    midpoints = [(low + high) / 2 for low, high in pairwise(E4M3)]
    beside = [f32(m * (1 + side * 2.0**-23)) for m in midpoints for side in (-1, 1)]
    values = [*E4M3, *midpoints, *beside, 449.0, 464.0, 480.0, 1e30, math.inf, 2.0**-11, 1e-40]
    values += [-v for v in values]
    assert to_e4m3(torch.tensor(values)).view(torch.uint8).tolist() == [e4m3_byte(v) for v in values]
    assert to_e4m3(torch.tensor([math.nan])).isnan().all()


def test_e2m1_codes_round_ties_to_even_and_saturate() -> None:
    """Every value, every midpoint and its neighbours, both signs, values past the range, and NaN."""
    midpoints = [(low + high) / 2 for low, high in pairwise(E2M1)]
    beside = [f32(m * (1 + side * 2.0**-23)) for m in midpoints for side in (-1, 1)]
    values = [*E2M1, *midpoints, *beside, 7.0, 1e30, math.inf]
    values += [-v for v in values]
    assert to_e2m1_codes(torch.tensor(values)).tolist() == [e2m1_code(v) for v in values]
    assert to_e2m1_codes(torch.tensor([math.nan])).tolist() == [7]


def test_tie_tables_of_this_file_are_right() -> None:
    """The naive code itself: 0.25 to 0, 0.75 to 1, 5 to 4, 2.5 to 2, 3.5 to 4 (OCP MX, ties to even)."""
    assert [E2M1[e2m1_code(x)] for x in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)] == [0, 1, 1, 2, 2, 4, 4]
    assert len(E4M3) == 127 and E4M3[-1] == 448.0 and E4M3[8] == 2.0**-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quant", list(QuantFormat))
def test_dequantize_returns_representable_values_unchanged(quant: QuantFormat, layout: ScaleLayout) -> None:
    """Values that each format holds exactly come back exactly, each at its place."""
    generator = torch.Generator().manual_seed(1)
    magnitudes = torch.tensor(E2M1)[torch.randint(0, 8, (5, 48), generator=generator)]
    values = magnitudes * (torch.randint(0, 2, (5, 48), generator=generator) * 2 - 1)
    values[:, ::16] = 6.0  # every block and token has the same amax, so every scale is a power of two
    values *= 2.0 ** torch.randint(-2, 3, (5, 1), generator=generator)
    recipe = QuantRecipe(quant, scale=0.25, global_scale=4.0, scale_layout=layout)
    if quant is QuantFormat.FP8_PER_TOKEN:
        values[:, 0] = 7 * 2.0**3  # amax / 448 is 2^-3
        values[:, 1:] = values[:, 1:].clamp(-4, 4)
    quant_out, quant_scale = quantize(values.bfloat16(), recipe)
    assert torch.equal(dequantize(quant_out, quant_scale, recipe, (5, 48)), values)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_norm_has_zero_codes(layout: ScaleLayout) -> None:
    """An all-zero block has scale 0 and codes 0, negative zeros included: nothing divides by it."""
    recipe = QuantRecipe(QuantFormat.NVFP4, global_scale=10.0, scale_layout=layout)
    quant_out, quant_scale = quantize(torch.full((2, 32), -0.0, dtype=torch.bfloat16), recipe)
    assert not quant_out.any() and not quant_scale.any()


def test_width_without_whole_blocks_is_refused_for_nvfp4_alone() -> None:
    """H = 24 is refused for NVFP4 with the reason, and fine for fp8."""
    norm = torch.ones(2, 24, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="QUANT-1: NVFP4 needs a hidden size that is a multiple of 16, got 24"):
        quantize(norm, QuantRecipe(QuantFormat.NVFP4))
    assert quantize(norm, QuantRecipe(QuantFormat.FP8_PER_TOKEN))[0].shape == (2, 24)
