"""NVFP4 experts in float64: what weights and inputs are quantised to, and which codes an inexact input allows.

Codes are specification, not error (moe_contract.quant): those of weights and hidden states are the same in every
correct implementation. Those of the activation's result are not, where its own error reaches the border of two codes;
the largest step over the codes that it allows is then part of the bound.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_conformance.truth.bounds import U32
from moe_conformance.truth.quant_oracle import e2m1_value, e4m3_value
from moe_contract import ExpertWeights
from moe_contract.quant import (
    FP4_MAX,
    FP8_MAX,
    NVFP4_BLOCK,
    NVFP4_HIDDEN_SCALE,
    NVFP4_INTERMEDIATE_SCALE,
    nvfp4_weight_scale,
)

LARGEST_KEPT = 2**24
"""Elements of one projection up to which a part's codes are kept: those of fixed profiles, not those of real models."""
ELEMENTS_AT_ONCE = 2**22
"""Elements that are quantised in one go: 32 MB in float64, of which a few copies exist."""
_KNOWN: dict[int, tuple[weakref.ref[Tensor], QuantizedExperts]] = {}
SCALE_ROUNDINGS = 4
"""Float32 roundings that undoing global scales takes: two reciprocals, two products with each term or with the sum."""
QUOTIENT_ROUNDINGS = 4
"""Float32 roundings of a block scale and of a quotient: two reciprocals, which may be approximate, and two products."""


@dataclass(frozen=True)
class QuantizedExperts:
    """Code times block scale, in bfloat16, which holds it exactly, and the global scales ``[E]`` of both GEMMs."""

    values: ExpertWeights
    first_scale: Tensor
    second_scale: Tensor

    def select(self, experts: Tensor) -> ExpertWeights:
        """The values that these experts' codes stand for, float64."""
        values = self.values.select(experts)
        first, second = (scale[experts, None, None].double() for scale in (self.first_scale, self.second_scale))
        return replace(
            values,
            up=values.up.double() / first,
            down=values.down.double() / second,
            gate=None if values.gate is None else values.gate.double() / first,
        )


def quantized_experts(weights: ExpertWeights, experts: Tensor) -> ExpertWeights:
    """The values that the codes of these of the experts stand for, float64.

    A small layer is quantised whole and kept while its weights live, since case after case asks for it; of a large one
    only what is asked for.
    """
    if weights.up.numel() > LARGEST_KEPT:
        return _quantize(weights.select(experts)).select(torch.arange(len(experts)))
    key = id(weights.up)
    known = _KNOWN.get(key)
    if known is None or known[0]() is not weights.up:
        known = weakref.ref(weights.up, lambda _: _KNOWN.pop(key, None)), _quantize(weights)
        _KNOWN[key] = known
    return known[1].select(experts)


def _quantize(weights: ExpertWeights) -> QuantizedExperts:
    halves = [weights.up] if weights.gate is None else [weights.up, weights.gate]
    first = nvfp4_weight_scale(torch.stack([_amax(half) for half in halves]).amax(0))
    second = nvfp4_weight_scale(_amax(weights.down))
    values = replace(
        weights,
        up=_unscaled(weights.up, first),
        down=_unscaled(weights.down, second),
        gate=None if weights.gate is None else _unscaled(weights.gate, first),
    )
    return QuantizedExperts(values, first, second)


def _unscaled(matrix: Tensor, scales: Tensor) -> Tensor:
    """``[E, M, K]`` through codes, few experts at a time, since they are in float64 meanwhile."""
    at_once = max(1, ELEMENTS_AT_ONCE // matrix[0].numel())
    parts = [
        (_quantized(part.double(), scale[:, None]) * scale[:, None, None].double()).to(torch.bfloat16)
        for part, scale in zip(matrix.split(at_once), scales.split(at_once), strict=True)
    ]
    return torch.cat(parts)


def quantized_inputs(tokens: Tensor) -> Tensor:
    """What the first GEMM reads of hidden states ``[..., H]``, float64."""
    return _quantized(tokens, torch.tensor(NVFP4_HIDDEN_SCALE))


def quantized_intermediate(inner: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """What the second GEMM reads of ``inner [..., I]``, which is off by ``error``, and the largest step away from it.

    A block scale is monotone in the block's largest magnitude and a code in its quotient, so the ends of the two
    intervals give the ends of the values; the error is far below the distance of two scales, so no third lies between.
    """
    scale = torch.tensor(NVFP4_INTERMEDIATE_SCALE)
    slack = error + QUOTIENT_ROUNDINGS * U32 * (inner.abs() + error)
    value = _quantized(inner, scale)
    width = inner.shape[-1]
    blocks, slacks = _blocks(inner), _blocks(slack)
    factors = [_block_scale(each, scale) for each in (_low(blocks, slacks), blocks.abs() + slacks)]
    nominal = _blocks(value)
    step = torch.zeros_like(blocks)
    for factor in factors:
        for end in (blocks - slacks, blocks + slacks):
            step = torch.maximum(step, (_values(end, factor, scale) - nominal).abs())
    return value, step.flatten(-2)[..., :width]


def _low(blocks: Tensor, slacks: Tensor) -> Tensor:
    return (blocks.abs() - slacks).clamp(min=0.0)


def _amax(matrix: Tensor) -> Tensor:
    return matrix.abs().amax((1, 2)).float()


def _quantized(values: Tensor, global_scale: Tensor) -> Tensor:
    """``values [..., n]`` through codes and back; ``global_scale`` broadcasts against ``values[..., 0]``."""
    blocks = _blocks(values)
    scale = global_scale.double().unsqueeze(-1)
    result = _values(blocks, _block_scale(blocks, scale), scale)
    return result.flatten(-2)[..., : values.shape[-1]]


def _blocks(values: Tensor) -> Tensor:
    """``[..., blocks, 16]``; a width below 16, as a sharded intermediate size has, stays one block without padding."""
    width = values.shape[-1]
    if width < NVFP4_BLOCK:
        return values.unsqueeze(-2)
    blocks: Tensor = pad(values, (0, -width % NVFP4_BLOCK)).unflatten(-1, (-1, NVFP4_BLOCK))
    return blocks


def _block_scale(blocks: Tensor, scale: Tensor) -> Tensor:
    return e4m3_value((scale * blocks.abs().amax(-1) / FP4_MAX).clamp(max=FP8_MAX))


def _values(blocks: Tensor, factor: Tensor, scale: Tensor) -> Tensor:
    factor, scale = factor.unsqueeze(-1), scale.unsqueeze(-1)
    # A scale of 0 belongs to a block of zeros, or of values so small that they count as such.
    quotient = blocks * torch.where(factor > 0, scale / factor, 0.0)
    result: Tensor = e2m1_value(quotient) * (factor / scale)
    return result
