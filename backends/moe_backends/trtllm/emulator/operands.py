"""What the two GEMMs read of prepared weights: the layout undone, once for each expert, and without its padding.

Padding is found in the prepared weights themselves, as zeros, never taken from what the layer is known to be: a row
that a wrong preparation has put elsewhere is read from where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_backends.common.weight_cache import TensorCache
from moe_backends.trtllm.bindings import SWIGLU
from moe_backends.trtllm.weights import nvfp4
from moe_backends.trtllm.weights.rows import first_gemm_order, inverse, second_gemm_order
from moe_contract.quant import NVFP4_BLOCK

from .on_demand import LARGEST_WHOLE, OnDemandTensor
from .recent import Recent

WEIGHTS = ("gemm1_weights", "gemm2_weights", "gemm1_weights_scale", "gemm2_weights_scale")
SCALES = ("output1_scale_gate_scalar", "output1_scale_scalar", "output2_scale_scalar")
WORD = 8
"""Bytes that are compared with zero at once."""


@dataclass(frozen=True)
class Operands:
    """Matrices of experts in canonical row order, with n of their I' intermediates.

    bfloat16. NVFP4 codes are multiplied by their block scales: the product has 6 significant
    bits, so that bfloat16 holds it.
    """

    first: Tensor
    """``[E, 1|2 * n, H']``, up above gate."""
    second: Tensor
    """``[E, H', n]``."""
    scales: Mapping[str, Tensor] = field(default_factory=dict)
    """NVFP4 only: the output scales by keyword, ``[E]`` float32."""

    def expert(self, index: int) -> Operands:
        """Those of one expert, without the first dimension."""
        scales = {name: value[index] for name, value in self.scales.items()}
        return Operands(self.first[index], self.second[index], scales)

    @property
    def size(self) -> int:
        """Elements."""
        return self.first.numel() + self.second.numel()


_WHOLE: TensorCache[Operands] = TensorCache(2 * LARGEST_WHOLE)
_RECENT: Recent[Operands] = Recent(lambda each: each.size)


def operands(given: Mapping[str, Any], expert: int) -> Operands:
    """What one expert of a call computes with; undone once, and kept while the weights live."""
    weights = given[WEIGHTS[0]]
    if isinstance(weights, OnDemandTensor):
        source = weights.source
        key = (source.weight_format, source.version, expert)
        one = _RECENT.get(source.weights.up, key, lambda: _restored({**given, **source.expert(expert)}))
        return one.expert(0)
    tensors = [given[name] for name in WEIGHTS if name in given]
    scales = {name: given[name] for name in SCALES if name in given}
    if weights.numel() <= 2 * LARGEST_WHOLE:
        kept = _WHOLE.get(tensors, lambda: _restored(given))
        return Operands(kept.first, kept.second, scales).expert(expert)
    part = {name: given[name][expert, None] for name in WEIGHTS if name in given}
    one = _RECENT.get(weights, (sum(each._version for each in tensors), expert), lambda: _restored({**given, **part}))
    return Operands(one.first, one.second, {name: value[expert, None] for name, value in scales.items()}).expert(0)


def gated(given: Mapping[str, Any]) -> bool:
    """Whether the first GEMM has a gate beside up."""
    return int(given.get("activation_type", SWIGLU)) == SWIGLU


def _restored(given: Mapping[str, Any]) -> Operands:
    scales = {name: given[name] for name in SCALES if name in given}
    first, second = (_nvfp4 if scales else _bf16)(given)
    return Operands(first, second, scales)


def _bf16(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    gemm1, gemm2 = given["gemm1_weights"], given["gemm2_weights"]
    rows = gemm1.view(torch.int64).flatten(0, 1).ne(0).any(0).any(1)
    words = gemm2.view(torch.int64).ne(0).any(2).any(0)
    places, kept = _kept(rows, words.view(-1, 2 * NVFP4_BLOCK // WORD).any(1), gated(given))
    first = gemm1.index_select(2, places).transpose(1, 2).flatten(2)
    sixteens = gemm2.unflatten(3, (-1, NVFP4_BLOCK))
    wide = sixteens.shape[3]
    second = torch.cat([sixteens[:, block // wide, :, block % wide] for block in kept], 2)
    return first, second.index_select(1, _rows_of_down(second))


def _nvfp4(given: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    codes1, codes2 = given["gemm1_weights"], given["gemm2_weights"]
    scales1, scales2 = (nvfp4.linear_scales(given[name]) for name in WEIGHTS[2:])
    rows = codes1.view(torch.int64).ne(0).any(2).any(0) | scales1.ne(0).any(2).any(0)
    blocks = codes2.view(torch.int64).ne(0).any(1).any(0) | scales2.ne(0).any(1).any(0)
    places, kept = _kept(rows, blocks, gated(given))
    first = nvfp4.values((codes1.index_select(1, places), scales1.index_select(1, places)))
    eights = codes2.unflatten(2, (-1, NVFP4_BLOCK // 2))
    codes = torch.cat([eights[:, :, block] for block in kept], 2)
    undo = _rows_of_down(codes)
    second = nvfp4.values((codes.index_select(1, undo), scales2[:, :, kept].index_select(1, undo)))
    return first.to(torch.bfloat16), second.to(torch.bfloat16)


def _rows_of_down(second: Tensor) -> Tensor:
    return inverse(second_gemm_order(second.shape[1])).to(second.device)


def _kept(rows: Tensor, blocks: Tensor, is_gated: bool) -> tuple[Tensor, list[int]]:
    """Prepared rows of the first projection, up above gate, and which blocks of 16 intermediates they are.

    ``rows [1|2 * I']`` and ``blocks [I' / 16]`` say which rows of the prepared first projection and which blocks of
    columns of the second hold anything. What is left out is 0 in up, gate and down, so its activation is 0 and meets 0.
    """
    places = inverse(first_gemm_order(len(rows), gated=is_gated)).to(rows.device).view(-1, len(blocks), NVFP4_BLOCK)
    used = rows[places].any(2).any(0) | blocks
    used[0] = True  # never no block at all
    return places[:, used].flatten(), used.nonzero()[:, 0].tolist()
