"""Float64 truth of one rank's rows: the experts' MLPs from the exact bits of weights and tokens, with bounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_conformance.cases.layer_data import LayerInputs
from moe_conformance.truth import bounds, nvfp4_oracle, routing_oracle
from moe_conformance.truth.bounds import EXACT, U32, UNIT_ROUNDOFF
from moe_conformance.truth.routing_oracle import RoutedTruth
from moe_contract import Activation, ExpertWeights, MoELayer, PrecomputedRouting, ProducerDeclaration, RoutingMethod
from moe_contract.declarations import Quantization
from moe_contract.dtypes import DtypeName, torch_dtype

SLOPE = 1.13
"""Largest slope of silu, of gelu and of x * sigmoid(1.702 x): 1.0998, 1.1290 and 1.0998."""
ACTIVATION_ULPS = 16
"""Roundings granted to one activation in float32: exp or tanh, a division and up to three products."""
EXPERTS_AT_ONCE = 16
"""Experts in one batched product: enough to make few calls, and few enough for 7168 x 2048 weights in float64."""
OAI_LIMIT = 7.0
OAI_ALPHA = 1.702
"""gpt-oss clamps gate and up at 7 and uses sigmoid(1.702 g) (its public model code)."""


@dataclass(frozen=True)
class RankTruth:
    """What one rank's unfinalized output holds, slot by slot in the order of the oracle's selection.

    Attributes:
        ids: ``[T, K]`` global expert ids.
        present: ``[T, K]`` bool: the expert is on this rank.
        rows, row_bounds: ``[T, K, H]``; 0 where not present.
        weights, weight_bounds: ``[T, K]``, the scale folded in where the producer declares it.
    """

    ids: Tensor
    present: Tensor
    rows: Tensor
    row_bounds: Tensor
    weights: Tensor
    weight_bounds: Tensor


@dataclass(frozen=True)
class RankRows:
    """The rows of one rank, which do not depend on how a producer weights them: ``ids``, ``present`` [T, K],
    ``rows``, ``bounds`` [T, K, H], and the routing's own truth."""

    routed: RoutedTruth
    present: Tensor
    rows: Tensor
    bounds: Tensor


def rank_rows(
    inputs: LayerInputs, part: MoELayer, intermediate_dtype: DtypeName, quantization: Quantization = "none"
) -> RankRows:
    """The exact rows of the rank that holds ``part`` of the layer."""
    routed = routing_oracle.route(inputs.layer.routing, inputs.router_logits)
    local = routed.ids - part.first_expert
    present = (local >= 0) & (local < part.num_local_experts)
    tokens, token_error = _expert_inputs(inputs, routed)
    select: Callable[[Tensor], ExpertWeights] = part.experts.select
    if quantization == "nvfp4":
        tokens, select = nvfp4_oracle.quantized_inputs(tokens), partial(nvfp4_oracle.quantized_experts, part.experts)
    shape = (*routed.ids.shape, part.hidden_size)
    rows, row_bounds = torch.zeros(shape, dtype=EXACT), torch.zeros(shape, dtype=EXACT)
    active = local[present].unique()
    for first in range(0, len(active), EXPERTS_AT_ONCE):
        experts = active[first : first + EXPERTS_AT_ONCE]
        token, slot = _routes_by_expert(local, experts)
        used = token >= 0
        batch = torch.where(used.unsqueeze(-1), tokens[token.clamp(min=0)], 0.0)
        error = None if token_error is None else token_error.select(token.clamp(min=0))
        chosen = select(experts)
        values, errors = mlp(
            chosen, part.activation, batch, part.dtype, intermediate_dtype, quantization, token_error=error
        )
        rows[token[used], slot[used]], row_bounds[token[used], slot[used]] = values[used], errors[used]
    return RankRows(routed, present, rows, row_bounds)


@dataclass(frozen=True)
class _InputError:
    """How far off an expert's weighted input may be: ``common``, the weight's relative error, the same in every column
    ``[..., 1]``, and ``rounding``, each product's own ``[..., H]``."""

    common: Tensor
    rounding: Tensor

    def select(self, tokens: Tensor) -> _InputError:
        """The errors of these tokens' inputs; any shape of indices."""
        return _InputError(self.common[tokens], self.rounding[tokens])


def _expert_inputs(inputs: LayerInputs, routed: RoutedTruth) -> tuple[Tensor, _InputError | None]:
    """What an expert is given of each token ``[T, H]``; with an error where a routing weight went into it.

    The weight, and the product, may be rounded to the activation dtype.
    """
    tokens, dtype = inputs.hidden_states.to(EXACT), inputs.hidden_states.dtype
    if inputs.layer.routing.method is not RoutingMethod.LLAMA4:
        return tokens, None
    weights = routed.weights
    off = bounds.store(weights, routed.relative_error * weights.abs(), dtype)
    rounding = bounds.store(weights * tokens, (weights.abs() + off) * U32 * tokens.abs(), dtype)
    return weights * tokens, _InputError(off / weights.abs(), rounding)


def _routes_by_expert(local: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
    """Token and slot of each expert's routes, ``[experts, most routes of one]``, -1 where an expert has fewer."""
    routes = [(local == expert).nonzero() for expert in experts.tolist()]
    padded = torch.nn.utils.rnn.pad_sequence(routes, batch_first=True, padding_value=-1)
    return padded[..., 0], padded[..., 1]


def rank_truth(
    inputs: LayerInputs, rows: RankRows, declaration: ProducerDeclaration, weights_dtype: torch.dtype
) -> RankTruth:
    """The rows with the weights that this producer declares: the scale folded in or not, in its weights dtype."""
    routing, routed = inputs.layer.routing, rows.routed
    if routing.method is RoutingMethod.LLAMA4:
        # Its one weight went into the expert's input, so nothing is left to apply (WGT-4).
        weights = torch.ones_like(routed.weights)
        return RankTruth(routed.ids, rows.present, rows.rows, rows.bounds, weights, torch.zeros_like(weights))
    scale = float(torch.tensor(routing.routed_scaling_factor)) if declaration.folds(routing.method) else 1.0
    weights = scale * routed.weights
    error = weights.abs() * (routed.relative_error + (U32 if scale != 1.0 else 0.0))
    given = inputs.router_logits
    verbatim = isinstance(given, PrecomputedRouting) and given.weights.dtype == weights_dtype
    weight_bounds = torch.zeros_like(weights) if verbatim else bounds.store(weights, error, weights_dtype)
    return RankTruth(routed.ids, rows.present, rows.rows, rows.bounds, weights, weight_bounds)


def mlp(
    experts: ExpertWeights,
    activation: Activation,
    tokens: Tensor,
    dtype: torch.dtype,
    intermediate_dtype: DtypeName,
    quantization: Quantization = "none",
    *,
    token_error: _InputError | None = None,
) -> tuple[Tensor, Tensor]:
    """``tokens [E, R, H]``, R for each expert, off by ``token_error``: the exact rows and their bounds.

    Where the experts are quantised, weights and tokens are the values that their codes stand for.
    """
    extra = nvfp4_oracle.SCALE_ROUNDINGS if quantization == "nvfp4" else 0
    up, up_error = _first_gemm(tokens, token_error, experts.up, experts.up_bias, extra)
    if experts.gate is None:
        inner, error = up.clamp(min=0).square(), 2.0 * up.abs() * up_error + up_error.square()
    else:
        gate, gate_error = _first_gemm(tokens, token_error, experts.gate, experts.gate_bias, extra)
        inner, error = _gated(activation, gate, gate_error, up, up_error)
    error = error + ACTIVATION_ULPS * U32 * (inner.abs() + error)
    inner_dtype = torch_dtype(intermediate_dtype)
    if inner_dtype is not torch.float32:
        error = bounds.store(inner, error, inner_dtype)
    if quantization == "nvfp4":
        inner, error = nvfp4_oracle.quantized_intermediate(inner, error)
    rows, row_error = _gemm(inner, error, experts.down, experts.down_bias, extra)
    return rows, bounds.store(rows, row_error, dtype)


def _gemm(x: Tensor, x_error: Tensor | None, weight: Tensor, bias: Tensor | None, extra: int) -> tuple[Tensor, Tensor]:
    """x W^T + bias with float32 accumulation; 6 sqrt(L) u is the probabilistic bound of a sum of L terms
    (below about 3e-8 per element to be exceeded; Higham and Mary, 2019). No error where x is exact. Each term may be
    rounded ``extra`` times more."""
    matrix = weight.to(EXACT).transpose(-1, -2)
    value, sizes = x @ matrix, matrix.abs()
    magnitude = (x.abs() if x_error is None else x.abs() + x_error) @ sizes
    error = (6.0 * math.sqrt(x.shape[-1]) + extra) * U32 * magnitude
    if x_error is not None:
        error = error + x_error @ sizes
    if bias is not None:
        value = value + bias.to(EXACT).unsqueeze(-2)
        error = error + U32 * (value.abs() + error)
    return value, error


def _first_gemm(
    tokens: Tensor, token_error: _InputError | None, weight: Tensor, bias: Tensor | None, extra: int
) -> tuple[Tensor, Tensor]:
    """As ``_gemm``, with inputs that may be off. A common error scales the product; roundings of their own are added
    up like those of a sum: beyond 6 times the root of their squares with a chance of about 3e-8."""
    value, error = _gemm(tokens, None, weight, bias, extra)
    if token_error is None:
        return value, error
    product = value if bias is None else value - bias.to(EXACT).unsqueeze(-2)
    squares = token_error.rounding.square() @ weight.to(EXACT).square().transpose(-1, -2)
    return value, error + token_error.common * product.abs() + 6.0 * (1.0 + token_error.common) * squares.sqrt()


def _gated(
    activation: Activation, gate: Tensor, gate_error: Tensor, up: Tensor, up_error: Tensor
) -> tuple[Tensor, Tensor]:
    if activation is Activation.SWIGLU_OAI:
        gate, up = gate.clamp(max=OAI_LIMIT), up.clamp(-OAI_LIMIT, OAI_LIMIT) + 1.0
        shaped = gate * torch.sigmoid(OAI_ALPHA * gate)
    elif activation is Activation.GELU_TANH:
        shaped = torch.nn.functional.gelu(gate, approximate="tanh")
    else:
        shaped = gate * torch.sigmoid(gate)
    error = SLOPE * gate_error * (up.abs() + up_error) + shaped.abs() * up_error
    # exp and tanh of a large argument lose that argument's size in units of the last place.
    return shaped * up, error + 4.0 * U32 * gate.abs() * (shaped * up).abs()


def finalized_truth(truth: RankTruth, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """This rank's finalized routed part ``[T, H]`` without a scale of the finalizer's, and its bound."""
    weights = torch.where(truth.present, truth.weights, 0.0).unsqueeze(-1)
    slack = torch.where(truth.present, truth.weight_bounds, 0.0).unsqueeze(-1)
    value = (weights * truth.rows).sum(1)
    error = (weights.abs() * truth.row_bounds + slack * (truth.rows.abs() + truth.row_bounds)).sum(1)
    magnitude = (weights * truth.rows).abs().sum(1) + error
    top_k = weights.shape[1]
    # A finalizing kernel may round each term to the activation dtype, as profile A does.
    error = error + bounds.growth(top_k + 1, dtype) * magnitude
    return value, error + UNIT_ROUNDOFF[dtype] * (value.abs() + error) + bounds.ETA[dtype] * (top_k + 1)
