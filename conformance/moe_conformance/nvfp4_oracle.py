"""NVFP4 experts in float64: what weights and inputs are quantised to, and which codes an inexact input allows.

Codes are specification, not error (moe_contract.quant): those of weights and hidden states are the same in every
correct implementation. Those of the activation's result are not, where its own error reaches the border of two codes;
the largest step over the codes that it allows is then part of the bound.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_conformance.bounds import U32
from moe_conformance.quant_oracle import e2m1_value, e4m3_value
from moe_contract import ExpertWeights
from moe_contract.quant import (
    FP4_MAX,
    FP8_MAX,
    NVFP4_BLOCK,
    NVFP4_HIDDEN_SCALE,
    NVFP4_INTERMEDIATE_SCALE,
    nvfp4_weight_scale,
)

SCALE_ROUNDINGS = 4
"""Float32 roundings of a dequantising factor and its use: two reciprocals, their product, its product with the sum."""
QUOTIENT_ROUNDINGS = 4
"""Float32 roundings of a block scale and of a quotient: two reciprocals, which may be approximate, and two products."""


def quantized_weights(weights: ExpertWeights) -> ExpertWeights:
    """The values that the codes of these experts stand for, float64; biases are not quantised."""
    halves = [weights.up] if weights.gate is None else [weights.up, weights.gate]
    first = nvfp4_weight_scale(torch.stack([_amax(half) for half in halves]).amax(0))
    second = nvfp4_weight_scale(_amax(weights.down))
    return ExpertWeights(
        up=_quantized(weights.up.double(), first[:, None]),
        down=_quantized(weights.down.double(), second[:, None]),
        gate=None if weights.gate is None else _quantized(weights.gate.double(), first[:, None]),
        up_bias=weights.up_bias,
        gate_bias=weights.gate_bias,
        down_bias=weights.down_bias,
    )


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
    return pad(values, (0, -values.shape[-1] % NVFP4_BLOCK)).unflatten(-1, (-1, NVFP4_BLOCK))


def _block_scale(blocks: Tensor, scale: Tensor) -> Tensor:
    return e4m3_value((scale * blocks.abs().amax(-1) / FP4_MAX).clamp(max=FP8_MAX))


def _values(blocks: Tensor, factor: Tensor, scale: Tensor) -> Tensor:
    factor, scale = factor.unsqueeze(-1), scale.unsqueeze(-1)
    quotient = torch.where(factor > 0, blocks * scale / factor, 0.0)
    result: Tensor = e2m1_value(quotient.clamp(-FP4_MAX, FP4_MAX)) * factor / scale
    return result
