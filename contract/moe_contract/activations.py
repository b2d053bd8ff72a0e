"""The functions between a layer's two GEMMs, in whatever floating dtype they are given."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from moe_contract.layer import Activation

SWIGLU_OAI_LIMIT = 7.0
"""Where gpt-oss clamps gate and up projections (its model configuration's ``swiglu_limit``)."""
SWIGLU_OAI_ALPHA = 1.702
"""Slope of gpt-oss's sigmoid: the constant of the sigmoid approximation of GELU."""


def apply_activation(activation: Activation, gate: Tensor | None, up: Tensor) -> Tensor:
    """``activation`` of the two projections, computed in their dtype (float32 or float64 for a reference).

    Raises:
        ValueError: a gated activation without ``gate``, or one that is not gated with it.
    """
    if activation.gated != (gate is not None):
        expected = "a gate projection" if activation.gated else "no gate projection"
        came = "none" if gate is None else "one"
        raise ValueError(f"activation {activation.value} takes {expected}, got {came}")
    if gate is None:
        return torch.relu(up).square()
    if activation is Activation.SILU:
        return functional.silu(gate) * up
    if activation is Activation.GELU_TANH:
        return functional.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=SWIGLU_OAI_LIMIT)
    up = up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
    return gate * torch.sigmoid(SWIGLU_OAI_ALPHA * gate) * (up + 1)
