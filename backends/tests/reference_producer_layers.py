"""Lattice layers for producer tests: small integers, so that every product and every partial sum is exact.

With x in -1..1, two non-zeros of +-1 per FC1 row and FC2 entries of -1..1, the squared ReLU of FC1 is at most 9 with a
bias, rows are at most 9 I + 1 = 37, and sums of two with weights of 1 or 2 at most 148: bfloat16 holds integers to 256.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_backends import reference
from moe_contract import (
    Activation,
    ExpertWeights,
    MoEConfig,
    MoELayer,
    PrecomputedRouting,
    Routing,
    RoutingMethod,
    UnfinalizedMoEOutput,
)

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 16, 4, 8, 2
DEFERRING = MoEConfig(defer_moe_finalize=True, tp_size=4)
TOPK = Routing(RoutingMethod.TOPK, TOP_K)
VARIANTS = {name: getattr(reference, name).producer for name in ("backend", "route_major", "folded", "fp32_weights")}
FINALIZING = MoEConfig()


def _integers(generator: torch.Generator, low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)


def _sparse(generator: torch.Generator, experts: int, dtype: torch.dtype) -> Tensor:
    """``[E, I, H]`` with two entries of +-1 per row."""
    at = torch.rand(experts, INTERMEDIATE, HIDDEN, generator=generator).argsort(-1)[..., :2]
    signs = torch.randint(0, 2, at.shape, generator=generator) * 2 - 1
    return torch.zeros(experts, INTERMEDIATE, HIDDEN).scatter_(-1, at, signs.float()).to(dtype)


def lattice_layer(
    *,
    routing: Routing = TOPK,
    activation: Activation = Activation.RELU2,
    dtype: torch.dtype = torch.bfloat16,
    biases: bool = False,
    seed: int = 0,
) -> MoELayer:
    """A whole layer of small integers."""
    generator = torch.Generator().manual_seed(seed)
    weights = {
        "up": _sparse(generator, NUM_EXPERTS, dtype),
        "down": _integers(generator, -1, 1, NUM_EXPERTS, HIDDEN, INTERMEDIATE, dtype=dtype),
    }
    if activation.gated:
        weights["gate"] = _sparse(generator, NUM_EXPERTS, dtype)
    if biases:
        weights["up_bias"] = _integers(generator, -1, 1, NUM_EXPERTS, INTERMEDIATE, dtype=dtype)
        weights["down_bias"] = _integers(generator, -1, 1, NUM_EXPERTS, HIDDEN, dtype=dtype)
        if activation.gated:
            weights["gate_bias"] = _integers(generator, -1, 1, NUM_EXPERTS, INTERMEDIATE, dtype=dtype)
    return MoELayer(HIDDEN, NUM_EXPERTS, routing, activation, ExpertWeights(**weights))


def lattice_batch(
    num_tokens: int, *, dtype: torch.dtype = torch.bfloat16, seed: int = 1, num_experts: int = NUM_EXPERTS
) -> tuple[Tensor, Tensor]:
    """``hidden_states`` and router logits; a logit is 1 or 2, exact as a TOPK weight."""
    generator = torch.Generator().manual_seed(seed)
    hidden = _integers(generator, -1, 1, num_tokens, HIDDEN, dtype=dtype)
    logits = torch.randint(1, 3, (num_tokens, num_experts), generator=generator).float()
    return hidden, logits


def looped_rows(layer: MoELayer, hidden: Tensor, ids: Tensor, factor: float = 1.0) -> Tensor:
    """``[T, K, H]`` float64: each route's unweighted row of a RELU2 layer, one at a time; inputs times ``factor``."""
    weights = layer.experts
    rows = torch.empty(*ids.shape, layer.hidden_size, dtype=torch.float64)
    for token, slots in enumerate(ids.tolist()):
        for slot, expert in enumerate(slots):
            up = weights.up[expert].double() @ (hidden[token].double() * factor)
            if weights.up_bias is not None:
                up = up + weights.up_bias[expert].double()
            down = weights.down[expert].double() @ up.clamp(min=0).square()
            rows[token, slot] = down if weights.down_bias is None else down + weights.down_bias[expert].double()
    return rows


def deferred(
    layer: MoELayer, hidden: Tensor, logits: Tensor | PrecomputedRouting, variant: str = "backend"
) -> UnfinalizedMoEOutput:
    """The triple of one call."""
    output = VARIANTS[variant].load(layer, DEFERRING)(hidden, logits)
    assert isinstance(output, UnfinalizedMoEOutput)
    return output


def finalized(layer: MoELayer, hidden: Tensor, logits: Tensor | PrecomputedRouting, variant: str = "backend") -> Tensor:
    """The finalized form of one call."""
    output = VARIANTS[variant].load(layer, FINALIZING)(hidden, logits)
    assert isinstance(output, Tensor)
    return output


def ids_of(logits: Tensor, top_k: int = TOP_K) -> Tensor:
    """TOPK's experts."""
    return torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :top_k]
