"""The shared expert of a layer in plain PyTorch: this rank's partial, neither scaled nor reduced (SHARED-1)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from moe_contract.activations import apply_activation
from moe_contract.layer import MoELayer


def shared_expert_output(layer: MoELayer, hidden_states: Tensor) -> Tensor | None:
    """``[T, H]`` in the activation dtype, computed in float32 and rounded once; None where there is no shared expert.

    Of a layer's shard it is that rank's partial: the sum over the shards is the shared expert's output.
    """
    if layer.shared is None:
        return None

    def project(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """One linear map in float32; the shared expert is expert 0 of its weights."""
        return linear(x, weight[0].float(), None if bias is None else bias[0].float())

    shared, x = layer.shared, hidden_states.float()
    gate = None if shared.gate is None else project(x, shared.gate, shared.gate_bias)
    inner = apply_activation(layer.activation, gate, project(x, shared.up, shared.up_bias))
    return project(inner, shared.down, shared.down_bias).to(layer.dtype)
