"""The two GEMMs of the experts, one active expert at a time, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_contract.activations import apply_activation
from moe_contract.layer import Activation, ExpertWeights


def expert_rows(
    x_rows: Tensor,
    expert_of_row: Tensor,
    weights: ExpertWeights,
    activation: Activation,
    *,
    input_weights: Tensor | None = None,
) -> Tensor:
    """Each row through its expert: FC1, activation, FC2 with the down bias, rounded once to the activation dtype.

    Accumulation and the intermediate are float32. Only experts that have rows are touched and converted, one at a
    time: the cost grows with the rows, and no float32 copy of all weights ever exists.

    Args:
        x_rows: ``[R, H]`` inputs in the activation dtype.
        expert_of_row: ``[R]`` int64 index into ``weights``, in any order.
        weights: the experts.
        activation: between the two GEMMs.
        input_weights: ``[R]`` factors of the inputs, for routing that weights an expert's input (LLAMA4).
    """
    out = torch.empty_like(x_rows)
    order = torch.argsort(expert_of_row, stable=True)
    experts, counts = torch.unique_consecutive(expert_of_row[order], return_counts=True)
    for expert, members in zip(experts.tolist(), torch.split(order, counts.tolist()), strict=True):
        x = x_rows[members].float()
        if input_weights is not None:
            x = x * input_weights[members].float().unsqueeze(1)
        out[members] = _expert(x, weights, expert, activation).to(out.dtype)
    return out


def _expert(x: Tensor, weights: ExpertWeights, expert: int, activation: Activation) -> Tensor:
    up = _linear(x, weights.up[expert], _bias(weights.up_bias, expert))
    gate = None if weights.gate is None else _linear(x, weights.gate[expert], _bias(weights.gate_bias, expert))
    hidden = apply_activation(activation, gate, up)
    return _linear(hidden, weights.down[expert], _bias(weights.down_bias, expert))


def _bias(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert].float()


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x @ weight.float().T
    return product if bias is None else product + bias
