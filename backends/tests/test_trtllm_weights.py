"""Prepared weights can be undone, and are bit for bit what FlashInfer's own preparation gives."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_backends.common.nvfp4 import swizzle_scales
from moe_backends.trtllm.weights import bf16, nvfp4
from moe_backends.trtllm.weights.blocks import from_blocks, to_blocks
from moe_backends.trtllm.weights.rows import first_gemm_order, inverse, pair_order, second_gemm_order, shuffle_order
from moe_contract import ExpertWeights
from moe_contract.quant import NVFP4_HIDDEN_SCALE, NVFP4_INTERMEDIATE_SCALE, swizzled_scale_offset

WHEEL_FOLDER = "MOE_CONFORMANCE_FLASHINFER"
"""Environment variable: a folder that holds an unpacked FlashInfer wheel, for the comparison below."""


def _weights(experts: int, intermediate: int, hidden: int, *, gated: bool = True, seed: int = 0) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    gate = draw(experts, intermediate, hidden) if gated else None
    return ExpertWeights(draw(experts, intermediate, hidden), draw(experts, hidden, intermediate), gate)


def _padded(weights: ExpertWeights, hidden_size: int, intermediate_size: int) -> tuple[Tensor, Tensor]:
    """``[up; gate]`` or up ``[E, 1|2 * I', H']`` and down ``[E, H', I']`` with zeros up to the padded sizes."""
    _, intermediate, hidden = weights.up.shape
    wide, high = hidden_size - hidden, intermediate_size - intermediate
    halves = [weights.up] if weights.gate is None else [weights.up, weights.gate]
    first = torch.cat([pad(half, (0, wide, 0, high)) for half in halves], dim=1)
    return first, pad(weights.down, (0, high, 0, wide))


def test_rows_are_paired_then_dealt_to_lanes() -> None:
    """Up and gate alternate; row 4 l + q of each block of 32 goes to place 8 q + l."""
    assert pair_order(8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    order = shuffle_order(64)
    for block in range(2):
        for quarter in range(4):
            for lane in range(8):
                assert order[32 * block + 8 * quarter + lane] == 32 * block + 4 * lane + quarter
    for each in (first_gemm_order(256, gated=True), first_gemm_order(128, gated=False), second_gemm_order(96)):
        assert torch.equal(each[inverse(each)], torch.arange(len(each)))


@pytest.mark.parametrize("rows", [16, 33])
def test_rows_that_no_block_holds_are_refused(rows: int) -> None:
    """Rows are shuffled in blocks of 32."""
    with pytest.raises(ValueError, match=f"multiple of 32 rows, got {rows}"):
        shuffle_order(rows)


def test_column_blocks_are_128_bytes() -> None:
    """64 bfloat16 or 128 uint8 columns; element (m, k) is at [k / b, m, k % b]."""
    matrix = torch.arange(3 * 256, dtype=torch.int16).view(torch.bfloat16).view(3, 256)
    blocked = to_blocks(matrix)
    assert blocked.shape == (4, 3, 64)
    assert to_blocks(torch.zeros(2, 3, 256, dtype=torch.uint8)).shape == (2, 2, 3, 128)
    bits = blocked.view(torch.int16)
    assert all(bits[k // 64, m, k % 64] == matrix.view(torch.int16)[m, k] for m in range(3) for k in (0, 63, 64, 255))
    assert torch.equal(from_blocks(blocked).view(torch.int16), matrix.view(torch.int16))
    with pytest.raises(ValueError, match="multiple of 64 columns, got 100"):
        to_blocks(torch.zeros(3, 100, dtype=torch.bfloat16))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("intermediate", "hidden"), [(128, 256), (4, 256), (48, 960), (200, 128)])
def test_bf16_preparation_can_be_undone(gated: bool, intermediate: int, hidden: int) -> None:
    """Every canonical weight is found again at its place, and everything else is zero padding."""
    weights = _weights(3, intermediate, hidden, gated=gated)
    prepared = bf16.prepare(weights)
    high, wide = prepared.intermediate_size, prepared.hidden_size
    assert high % 128 == 0 and wide % 128 == 0 and high - intermediate < 128 and wide - hidden < 128
    assert prepared.gemm1.shape == (3, wide // 64, (2 if gated else 1) * high, 64)
    assert prepared.gemm2.shape == (3, high // 64, wide, 64)
    found = bf16.unpadded(prepared, hidden, intermediate, gated=gated)
    for name in ("up", "down", "gate"):
        expected = getattr(weights, name)
        assert (expected is None) == (getattr(found, name) is None)
        assert expected is None or torch.equal(getattr(found, name), expected)
    total = sum(each.count_nonzero() for each in (weights.up, weights.down, weights.gate) if each is not None)
    assert prepared.gemm1.count_nonzero() + prepared.gemm2.count_nonzero() == total


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("intermediate", "hidden"), [(128, 256), (4, 256), (48, 960)])
def test_nvfp4_preparation_can_be_undone(gated: bool, intermediate: int, hidden: int) -> None:
    """Restored codes and scales stand for each weight within half a step, and for zero in the padding."""
    weights = _weights(2, intermediate, hidden, gated=gated)
    prepared = nvfp4.prepare(weights)
    order = first_gemm_order(prepared.gemm1.shape[1], gated=gated)
    first = nvfp4.values(nvfp4.restore(prepared.gemm1, prepared.gemm1_scale, order))
    second = nvfp4.values(
        nvfp4.restore(prepared.gemm2, prepared.gemm2_scale, second_gemm_order(prepared.gemm2.shape[1]))
    )
    undo1 = prepared.output1_gate_scale * NVFP4_HIDDEN_SCALE
    undo2 = prepared.output2_scale * NVFP4_INTERMEDIATE_SCALE
    canonical1, canonical2 = _padded(weights, prepared.hidden_size, prepared.intermediate_size)
    for values, undo, expected in ((first, undo1, canonical1), (second, undo2, canonical2)):
        found = values * undo[:, None, None]
        largest = (
            expected.float().unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True).expand(*expected.shape[:2], -1, 16)
        )
        # Half the widest step of e2m1 is 1 of 6, and the block scale may be a sixteenth too small or large.
        off = (found - expected.float()).abs()
        assert bool((off <= largest.flatten(-2) * (1 / 6 + 1 / 16)).all())
        assert bool((found[expected == 0] == 0).all())
    expected_gate = NVFP4_INTERMEDIATE_SCALE * prepared.output1_gate_scale if gated else None
    if expected_gate is not None:
        assert torch.equal(prepared.output1_scale, expected_gate)
    else:
        assert bool((prepared.output1_scale == torch.tensor(NVFP4_INTERMEDIATE_SCALE)).all())


def test_block_scales_lie_where_the_contract_says() -> None:
    """The byte of (row, block) of an expert is at the offset of moe_contract.quant, after the rows are shuffled."""
    weights = _weights(2, 128, 256)
    prepared = nvfp4.prepare(weights)
    order = second_gemm_order(256)
    linear = nvfp4.restore(prepared.gemm2, prepared.gemm2_scale, order)[1]
    flat = prepared.gemm2_scale.view(torch.uint8).reshape(2, -1)
    for row, block in ((0, 0), (1, 3), (37, 5), (255, 7)):
        assert bool((flat[:, swizzled_scale_offset(row, block, 8)] == linear[:, int(order[row]), block]).all())


@pytest.fixture(scope="module")
def flashinfer_core() -> Iterator[ModuleType]:
    """``flashinfer.fused_moe.core``, from the installed package or an unpacked wheel; where it is not, tests skip."""
    folder = os.environ.get(WHEEL_FOLDER)
    if folder and Path(folder).is_dir():
        sys.path.insert(0, folder)
    try:
        yield importlib.import_module("flashinfer.fused_moe.core")
    except Exception as error:
        pytest.skip(f"FlashInfer's preparation cannot be imported here ({type(error).__name__}: {error})")
    finally:
        if folder and folder in sys.path:
            sys.path.remove(folder)


@pytest.mark.parametrize("gated", [True, False])
def test_bf16_preparation_is_flashinfers(flashinfer_core: Any, gated: bool) -> None:
    """Row order, shuffle and column blocks equal those of FlashInfer's functions, bit for bit."""
    weights = _weights(2, 256, 384, gated=gated)
    prepared = bf16.prepare(weights)
    halves = [weights.up] if weights.gate is None else [weights.up, weights.gate]
    for expert in range(2):
        for matrix, found, first in (
            (torch.cat([half[expert] for half in halves]), prepared.gemm1[expert], True),
            (weights.down[expert], prepared.gemm2[expert], False),
        ):
            data = matrix.view(torch.uint8)
            order = _flashinfer_order(flashinfer_core, data, gated, first=first)
            expected = flashinfer_core.convert_to_block_layout(data[order].contiguous(), 128)
            assert torch.equal(found.view(torch.uint8), expected)


@pytest.mark.parametrize("gated", [True, False])
def test_nvfp4_row_order_is_flashinfers(flashinfer_core: Any, gated: bool) -> None:
    """Codes and block scales are in the row order of FlashInfer's functions; its swizzle needs a GPU kernel."""
    weights = _weights(1, 256, 256, gated=gated)
    prepared = nvfp4.prepare(weights)
    for codes, scales, first in (
        (prepared.gemm1, prepared.gemm1_scale, True),
        (prepared.gemm2, prepared.gemm2_scale, False),
    ):
        rows = codes.shape[1]
        ours = first_gemm_order(rows, gated=gated) if first else second_gemm_order(rows)
        linear_codes, linear_scales = nvfp4.restore(codes, scales, ours)
        order = _flashinfer_order(flashinfer_core, linear_codes[0], gated, first=first)
        assert torch.equal(codes[0], linear_codes[0][order])
        order = _flashinfer_order(flashinfer_core, linear_scales[0], gated, first=first, num_elts_per_sf=16)
        swizzled = swizzle_scales(linear_scales[0][order])
        assert torch.equal(scales[0].view(torch.uint8).reshape(-1), swizzled.reshape(-1))


def _flashinfer_order(core: Any, data: Tensor, gated: bool, *, first: bool, **options: int) -> Tensor:
    if first:
        order: Tensor = core._maybe_get_cached_w3_w1_permute_indices({}, data, 128, is_gated_act_gemm=gated, **options)
    else:
        order = core.get_w2_permute_indices_with_cache({}, data, 128, **options)
    return order
