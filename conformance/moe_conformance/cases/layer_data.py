"""A whole layer with its tokens and router logits; the same case gives the same bits on every machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_conformance.cases.case import LayerCase
from moe_conformance.cases.latest import Latest
from moe_conformance.cases.streams import Purpose, stream
from moe_conformance.truth import routing_oracle
from moe_contract import ExpertWeights, MoELayer, PrecomputedRouting, Routing, RoutingMethod
from moe_contract.dtypes import torch_dtype

LOGIT_RANGE = 4.0
"""Largest logit: sigmoids stay below 0.983, so that neighbouring scores differ by far more than float32 rounding."""
INPUT_WEIGHT_SHIFT = -LOGIT_RANGE
"""Added to LLAMA4's logits, so that the largest is below 0 and every sigmoid weight below one half: a weight near 1 on
an expert's input gives nearly what it gives on the output, which the rounding of the weighted input would hide."""
MIN_SELECTION_GAP = 2.0**-14
"""Least distance between the last selected score and the first that is not, or between groups: 1,000 times what
float32 loses on a score below 2, so that every correct router selects the same experts."""
MAX_DRAWS = 200
"""Draws of logits before a case is given up; a fair draw of 17 tokens succeeds within a few."""
Draw = Callable[[tuple[int, ...], int, torch.Generator], Tensor]
"""``draw(shape, fan_in, generator)``"""


@dataclass(frozen=True)
class LayerInputs:
    """A whole layer and one batch. ``router_logits`` is PrecomputedRouting where the router is outside."""

    layer: MoELayer
    hidden_states: Tensor
    router_logits: Tensor | PrecomputedRouting
    residual: Tensor
    norm_weight: Tensor


EXPERT_SHIFT = 4099
"""Experts are windows on one pool of random numbers, this far apart: drawing each of 384 experts anew takes minutes.
A prime, so that no expert's rows or columns are another's."""


def make_layer_inputs(case: LayerCase) -> LayerInputs:
    """The inputs of a case. Weights are shared with other cases, and must not be written."""
    generator = stream(case.seed, Purpose.LAYER_INPUTS)
    dtype = torch_dtype(case.dtype)
    routing = _routing(case, generator)
    experts, shared = _weights(weights_key(case))
    layer = MoELayer(case.hidden_size, case.num_experts, routing, case.activation, experts, shared)
    shape = (case.tokens, case.hidden_size)
    hidden = _draw(case)(shape, 1, generator).to(dtype)
    residual = torch.randn(shape, generator=generator).to(dtype)
    norm_weight = (1.0 + 0.25 * torch.randn(case.hidden_size, generator=generator)).to(dtype)
    return LayerInputs(layer, hidden, _router_output(case, routing, generator), residual, norm_weight)


def make_parts(case: LayerCase) -> list[MoELayer]:
    """The layer's part on each rank, in rank order: ``ep`` groups of ``ranks / ep`` tensor-parallel ranks.

    Their weights are shared with other cases, and must not be written.
    """
    routing = _routing(case, stream(case.seed, Purpose.LAYER_INPUTS))
    return [replace(part, routing=routing) for part in _parts(weights_key(case), case.ranks, case.ep)]


def weights_key(case: LayerCase) -> LayerCase:
    """The case with every field at rest that its weights do not depend on."""
    return case.model_copy(update=_NEUTRAL)


def _parts(key: LayerCase, ranks: int, ep: int) -> list[MoELayer]:
    # The weights before the parts: _weights locks both, in this order.
    experts, shared = _weights(key)

    def make() -> list[MoELayer]:
        layer = MoELayer(key.hidden_size, key.num_experts, Routing(key.method, 1), key.activation, experts, shared)
        tp = ranks // ep
        return [layer.shard(rank % tp, tp, rank // tp, ep) for rank in range(ranks)]

    return _LATEST_PARTS.get((key, ranks, ep), make)


def _weights(key: LayerCase) -> tuple[ExpertWeights, ExpertWeights | None]:
    def make() -> tuple[ExpertWeights, ExpertWeights | None]:
        _LATEST_PARTS.drop()
        return _make_weights(key)

    return _LATEST_WEIGHTS.get(key, make)


def _make_weights(case: LayerCase) -> tuple[ExpertWeights, ExpertWeights | None]:
    generator = stream(case.seed, Purpose.LAYER_WEIGHTS)
    experts = _experts(case, case.num_experts, case.intermediate_size, case.biases, generator)
    if not case.shared_intermediate_size:
        return experts, None
    return experts, _experts(case, 1, case.shared_intermediate_size, False, generator)


_LATEST_WEIGHTS: Latest[LayerCase, tuple[ExpertWeights, ExpertWeights | None]] = Latest()
_LATEST_PARTS: Latest[tuple[LayerCase, int, int], list[MoELayer]] = Latest()


# The fields that weights do not depend on, at rest; a field that is not here is taken to change them.
_NEUTRAL = {"tokens": 0, "top_k": 1, "ranks": 1, "ep": 1, "method": RoutingMethod.DEFAULT, "scale": 1.0, "skew": False,
            "num_groups": 1, "topk_groups": 1, "router_dtype": "float32", "precomputed_weights": "activation",
            "weight_bias": 0.0}  # fmt: skip


def _draw(case: LayerCase) -> Draw:
    return _lattice_draw if case.stratum == "lattice" else _normal_draw


def _routing(case: LayerCase, generator: torch.Generator) -> Routing:
    bias = None
    if case.method.takes_bias:
        bias = 0.1 * torch.randn(case.num_experts, generator=generator)
    return Routing(
        method=case.method,
        top_k=case.top_k,
        num_groups=case.num_groups,
        topk_groups=case.topk_groups,
        routed_scaling_factor=case.scale,
        bias=bias,
    )


def _normal_draw(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """N(0, 1 / fan_in), drawn in float32."""
    return torch.randn(shape, generator=generator) / math.sqrt(fan_in)


def _lattice_draw(shape: tuple[int, ...], fan_in: int, generator: torch.Generator) -> Tensor:
    """-1, 0 or 1; sparse where many are summed, about four per sum, so that results stay small integers."""
    signs = 2.0 * torch.randint(0, 2, shape, generator=generator) - 1.0
    if fan_in == 1:
        return signs
    return signs * (torch.rand(shape, generator=generator) < 4.0 / fan_in)


def _experts(
    case: LayerCase, experts: int, intermediate: int, biases: bool, generator: torch.Generator
) -> ExpertWeights:
    dtype, hidden = torch_dtype(case.dtype), case.hidden_size

    def weight(shape: tuple[int, ...], fan_in: int) -> Tensor:
        size = math.prod(shape)
        pool = _draw(case)((size + EXPERT_SHIFT * (experts - 1),), fan_in, generator).to(dtype)
        windows = pool.as_strided((experts, size), (EXPERT_SHIFT, 1))
        return windows.reshape(experts, *shape).contiguous()

    gated = case.activation.gated
    return ExpertWeights(
        up=weight((intermediate, hidden), hidden),
        down=weight((hidden, intermediate), intermediate),
        gate=weight((intermediate, hidden), hidden) if gated else None,
        up_bias=weight((intermediate,), 1) if biases else None,
        gate_bias=weight((intermediate,), 1) if biases and gated else None,
        down_bias=weight((hidden,), 1) if biases else None,
    )


def _router_output(case: LayerCase, routing: Routing, generator: torch.Generator) -> Tensor | PrecomputedRouting:
    """Logits without ties, and with a margin at every selection."""
    if case.method is RoutingMethod.PRECOMPUTED:
        return _precomputed(case, generator)
    dtype = torch_dtype(case.dtype) if case.router_dtype == "activation" else torch.float32
    logits = torch.empty(case.tokens, case.num_experts, dtype=dtype)
    pending = torch.arange(case.tokens)
    for _ in range(MAX_DRAWS):
        if not pending.numel():
            return logits
        logits[pending] = _logits(case, len(pending), generator).to(dtype)
        gaps = routing_oracle.selection_gap(routing, logits[pending])
        pending = pending[gaps < MIN_SELECTION_GAP]
    if pending.numel():
        raise ValueError(f"no tie-free logits for {case.id} in {MAX_DRAWS} draws")
    return logits


def _logits(case: LayerCase, tokens: int, generator: torch.Generator) -> Tensor:
    """Distinct integers times a power of two, so that they stay distinct in 16 bits up to 512 experts."""
    experts = case.num_experts
    ranks = torch.rand(tokens, experts, generator=generator).argsort(1).argsort(1)
    step = 2.0 ** math.floor(math.log2(2.0 * LOGIT_RANGE / max(experts, 2)))
    logits = (ranks - experts // 2).float() * step
    if case.skew:
        # The first top_k experts change places with the largest logits of the token.
        order = logits.argsort(1, descending=True)
        values = logits.gather(1, order)
        favourites = torch.arange(experts).expand(tokens, -1)
        logits = torch.empty_like(logits).scatter(1, favourites, values)
    return logits + INPUT_WEIGHT_SHIFT if case.method.weights_input else logits


def _precomputed(case: LayerCase, generator: torch.Generator) -> PrecomputedRouting:
    """A router outside the kernel: sqrt(softplus(logit)), renormalised, as DeepSeek-V4's public config says."""
    logits = _logits(case, case.tokens, generator)
    scores = torch.nn.functional.softplus(logits).sqrt()
    values, ids = scores.topk(case.top_k, dim=-1)
    dtype = torch.float32 if case.precomputed_weights == "float32" else torch_dtype(case.dtype)
    weights = values / values.sum(-1, keepdim=True)
    return PrecomputedRouting(ids.to(torch.int32), weights.to(dtype))
