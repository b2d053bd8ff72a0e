"""Layers and inputs that do not fit together: refused with what was expected and what came."""

from __future__ import annotations

from torch import Tensor

from moe_contract import MoELayer, PrecomputedRouting, ProducerDeclaration, RoutingMethod
from moe_contract.dtypes import dtype_name
from moe_contract.limits import require_tokens


def require_weights(layer: MoELayer) -> None:
    """Refuses weights whose shapes or dtypes do not fit together; ValueError names the tensor."""
    weights, activation = layer.experts, layer.activation
    if weights.up.dim() != 3 or weights.up.shape[2] != layer.hidden_size:
        raise ValueError(f"experts.up: expected [E, I, {layer.hidden_size}], got {list(weights.up.shape)}")
    experts, intermediate, hidden = weights.up.shape
    if layer.first_expert < 0 or layer.first_expert + experts > layer.num_experts:
        held = f"{layer.first_expert}..{layer.first_expert + experts - 1}"
        raise ValueError(f"experts: this rank holds {held}, which is not within the layer's {layer.num_experts}")
    if activation.gated != (weights.gate is not None):
        raise ValueError(f"experts.gate: expected {'a tensor' if activation.gated else 'None'} for {activation}")
    shapes = {
        "gate": (experts, intermediate, hidden),
        "down": (experts, hidden, intermediate),
        "up_bias": (experts, intermediate),
        "gate_bias": (experts, intermediate),
        "down_bias": (experts, hidden),
    }
    for name, shape in shapes.items():
        tensor: Tensor | None = getattr(weights, name)
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != layer.dtype):
            got = f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"
            raise ValueError(f"experts.{name}: expected {list(shape)} {dtype_name(layer.dtype)}, got {got}")


def require_batch(
    layer: MoELayer, declaration: ProducerDeclaration, hidden_states: Tensor, router_logits: Tensor | PrecomputedRouting
) -> None:
    """Refuses inputs at the call.

    Raises:
        ValueError: inputs that do not fit the layer.
        UnsupportedError: more tokens than declared.
    """
    expected = f"[T, {layer.hidden_size}] {dtype_name(layer.dtype)} on {layer.device}"
    fits = hidden_states.dim() == 2 and hidden_states.shape[1] == layer.hidden_size
    if not fits or hidden_states.dtype != layer.dtype or hidden_states.device != layer.device:
        got = f"{list(hidden_states.shape)} {dtype_name(hidden_states.dtype)} on {hidden_states.device}"
        raise ValueError(f"hidden_states: expected {expected}, got {got}")
    num_tokens = hidden_states.shape[0]
    require_tokens(declaration, num_tokens)
    _require_router_input(layer, num_tokens, router_logits)


def _require_router_input(layer: MoELayer, num_tokens: int, given: Tensor | PrecomputedRouting) -> None:
    precomputed = isinstance(given, PrecomputedRouting)
    if precomputed != (layer.routing.method is RoutingMethod.PRECOMPUTED):
        expected = "router logits [T, E]" if precomputed else "PrecomputedRouting(ids, weights)"
        raise ValueError(
            f"router_logits: routing method {layer.routing.method} expects {expected}, got {type(given).__name__}"
        )
    if isinstance(given, PrecomputedRouting):
        width = layer.routing.top_k
        tensors = {"precomputed ids": given.ids, "precomputed weights": given.weights}
    else:
        width = layer.num_experts
        tensors = {"router_logits": given}
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != (num_tokens, width) or tensor.device != layer.device:
            raise ValueError(
                f"{name}: expected [{num_tokens}, {width}] on {layer.device} for {num_tokens} tokens of hidden_states, "
                f"got {list(tensor.shape)} on {tensor.device}"
            )
