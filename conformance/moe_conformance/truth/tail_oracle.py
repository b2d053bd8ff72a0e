"""Float64 truth of a tail, computed from the exact bits that the tail is given, with the derived bound beside it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.cases.tail_data import TailInputs
from moe_conformance.truth import bounds
from moe_conformance.truth.bounds import EXACT
from moe_contract import ConsumerDeclaration, MoEOutput
from moe_contract.outputs import require_unfinalized


@dataclass(frozen=True)
class Truth:
    """``value [T, H]`` and ``bound [T, H]``, float64: the exact result and the largest error a correct one has."""

    value: Tensor
    bound: Tensor


@dataclass(frozen=True)
class LocalPart:
    """One rank's exact contribution: ``value``, ``magnitude`` [T, H], and ``roundings`` [T, 1]."""

    value: Tensor
    magnitude: Tensor
    roundings: Tensor


def route_terms(output: MoEOutput) -> Tensor:
    """``[T, K, H]`` float64 weight x row of every slot, exactly 0 where the map says -1."""
    routed = require_unfinalized(output)
    index = routed.expanded_idx_to_permuted_idx.long()
    present = (index >= 0).unsqueeze(-1)
    if routed.gemm2_permuted.shape[0] == 0:
        return torch.zeros(*index.shape, routed.gemm2_permuted.shape[1], dtype=EXACT, device=index.device)
    rows = routed.gemm2_permuted[index.clamp(min=0)].to(EXACT)
    products = rows * routed.expert_weights.to(EXACT).unsqueeze(-1)
    return torch.where(present, products, 0.0)


def local_part(output: MoEOutput) -> LocalPart:
    """This rank's exact contribution to the reduction: scale x top-k sum + shared output."""
    scale = float(output.routed_scaling_factor)
    if isinstance(output.routed, Tensor):
        value = output.routed.to(EXACT)
        magnitude = value.abs()
        roundings = torch.zeros(value.shape[0], 1, dtype=EXACT, device=value.device)
    else:
        terms = route_terms(output)
        value, magnitude = terms.sum(1), terms.abs().sum(1)
        present = require_unfinalized(output).expanded_idx_to_permuted_idx >= 0
        roundings = present.sum(1, keepdim=True).to(EXACT)
    if scale != 1.0:
        # The kernel is given the factor as float32, which is the one it multiplies with.
        exact_scale = float(torch.tensor(scale, dtype=torch.float32))
        value, magnitude, roundings = exact_scale * value, abs(exact_scale) * magnitude, roundings + 1
    if output.shared_output is not None:
        shared = output.shared_output.to(EXACT)
        value, magnitude, roundings = value + shared, magnitude + shared.abs(), roundings + 1
    return LocalPart(value, magnitude, roundings)


def residual_truth(inputs: TailInputs, declaration: ConsumerDeclaration) -> Truth:
    """``residual_out``: the sum over ranks plus the residual, and its bound under the declared profile."""
    dtype = inputs.residual.dtype
    total = torch.zeros_like(inputs.residual, dtype=EXACT)
    error, magnitude = torch.zeros_like(total), torch.zeros_like(total)
    for output in inputs.outputs:
        part = local_part(output)
        own = bounds.local_sum(
            part.value,
            part.magnitude,
            part.roundings,
            dtype,
            declaration.profile,
            declaration.scale_placement,
            scale=float(torch.tensor(output.routed_scaling_factor, dtype=torch.float32)),
        )
        total, error, magnitude = total + part.value, error + own, magnitude + part.value.abs() + own
    error = bounds.rank_sum(magnitude, error, len(inputs.outputs), dtype, declaration.profile)
    value = total + inputs.residual.to(EXACT)
    return Truth(value, bounds.residual(value, error, dtype))


def norm_truth(residual_out: Tensor, inputs: TailInputs) -> Truth:
    """``norm_out`` of the residual that was observed, and its bound."""
    x = residual_out.to(EXACT)
    hidden = x.shape[1]
    root = torch.rsqrt(x.square().mean(1, keepdim=True) + inputs.eps)
    gain = inputs.norm_weight.to(EXACT) + inputs.weight_bias
    value = x * root * gain
    return Truth(value, bounds.rms_norm(value, hidden, residual_out.dtype))
