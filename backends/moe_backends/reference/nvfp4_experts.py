"""The experts in NVFP4: weights and inputs of both GEMMs through codes and back, all arithmetic in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_backends.common.nvfp4 import nvfp4_linear, nvfp4_values
from moe_backends.common.weight_cache import WeightCache
from moe_contract.activations import apply_activation
from moe_contract.layer import Activation, ExpertWeights
from moe_contract.quant import NVFP4_BLOCK, NVFP4_HIDDEN_SCALE, NVFP4_INTERMEDIATE_SCALE, nvfp4_weight_scale


@dataclass(frozen=True)
class QuantizedExperts:
    """Codes times block scales in bfloat16, which holds them exactly, and the global scales ``[E]`` of each GEMM."""

    values: ExpertWeights
    first_scale: Tensor
    second_scale: Tensor


def quantize_experts(weights: ExpertWeights) -> QuantizedExperts:
    """Every expert's codes, as values without the global scale; biases are not quantised."""
    halves = [weights.up] if weights.gate is None else [weights.up, weights.gate]
    first = nvfp4_weight_scale(torch.stack([half.abs().amax((1, 2)).float() for half in halves]).amax(0))
    second = nvfp4_weight_scale(weights.down.abs().amax((1, 2)).float())
    values = replace(
        weights,
        up=_unscaled(weights.up, first[:, None]),
        down=_unscaled(weights.down, second[:, None]),
        gate=None if weights.gate is None else _unscaled(weights.gate, first[:, None]),
    )
    return QuantizedExperts(values, first, second)


_CACHE = WeightCache(quantize_experts)


def nvfp4_rows(
    hidden_states: Tensor, tokens: Tensor, expert_of_row: Tensor, weights: ExpertWeights, activation: Activation
) -> Tensor:
    """As ``expert_rows`` of ``hidden_states[tokens]``, with everything that a GEMM reads quantised.

    Each quantisation is one pass over all rows: moe_contract.quant defines codes row by row.
    """
    quantized = _CACHE.get(weights)
    inputs = _unscaled(hidden_states, _full(NVFP4_HIDDEN_SCALE, hidden_states)).float()
    order = torch.argsort(expert_of_row, stable=True)
    experts, counts = torch.unique_consecutive(expert_of_row[order], return_counts=True)
    groups = list(zip(experts.tolist(), counts.tolist(), strict=True))
    parts = inputs[tokens[order]].split(counts.tolist())
    inner = torch.cat([_first(x, quantized, each, activation) for x, (each, _) in zip(parts, groups, strict=True)])
    inner = _unscaled(inner, _full(NVFP4_INTERMEDIATE_SCALE, inner)).float()
    parts = inner.split(counts.tolist())
    rows = torch.cat([_second(x, quantized, each) for x, (each, _) in zip(parts, groups, strict=True)])
    return torch.empty_like(rows, dtype=hidden_states.dtype).index_copy_(0, order, rows.to(hidden_states.dtype))


def _first(x: Tensor, quantized: QuantizedExperts, expert: int, activation: Activation) -> Tensor:
    weights = quantized.values
    undo = 1.0 / quantized.first_scale[expert] * (1.0 / NVFP4_HIDDEN_SCALE)
    up = _linear(x, weights.up, weights.up_bias, expert, undo)
    gate = None if weights.gate is None else _linear(x, weights.gate, weights.gate_bias, expert, undo)
    return apply_activation(activation, gate, up)


def _second(x: Tensor, quantized: QuantizedExperts, expert: int) -> Tensor:
    weights = quantized.values
    undo = 1.0 / quantized.second_scale[expert] * (1.0 / NVFP4_INTERMEDIATE_SCALE)
    return _linear(x, weights.down, weights.down_bias, expert, undo)


def _full(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, device=like.device)


def _linear(x: Tensor, weights: Tensor, biases: Tensor | None, expert: int, undo: Tensor) -> Tensor:
    """``x W^T`` with the global scales undone, plus the bias, in float32."""
    product = x @ weights[expert].float().T * undo
    return product if biases is None else product + biases[expert].float()


def _unscaled(values: Tensor, global_scale: Tensor) -> Tensor:
    """``[..., n]`` through codes to code times block scale, bfloat16; ``global_scale`` broadcasts over ``[..., 0]``."""
    width = values.shape[-1]
    filled = pad(values.float(), (0, -width % NVFP4_BLOCK))
    return nvfp4_values(*nvfp4_linear(filled, global_scale))[..., :width].to(torch.bfloat16)
