"""What a tail refuses, on metadata alone: no tensor is read, no device is waited for. For every consumer here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from moe_contract import (
    ConsumerDeclaration,
    ContractViolation,
    MoEOutput,
    QuantFormat,
    QuantRecipe,
    TailCapacity,
    UnfinalizedMoEOutput,
    Violation,
    is_unfinalized,
)
from moe_contract.checks import Expectation, check
from moe_contract.dtypes import dtype_name
from moe_contract.limits import Beyond, refuse
from moe_contract.quant import NVFP4_BLOCK


def as_moe_output(output: object) -> MoEOutput:
    """What the contract's checks accept, by its attributes; a bare triple or tensor has neither scale nor shared."""
    if isinstance(output, Tensor) or is_unfinalized(output):
        return MoEOutput(cast(Tensor | UnfinalizedMoEOutput, output))
    routed = getattr(output, "routed", output)
    shared, scale = getattr(output, "shared_output", None), getattr(output, "routed_scaling_factor", 1.0)
    return MoEOutput(cast(Tensor | UnfinalizedMoEOutput, routed), shared, scale)


def refuse_bad_inputs(
    declaration: ConsumerDeclaration,
    capacity: TailCapacity,
    output: MoEOutput,
    residual: Tensor,
    norm_weight: Tensor,
    weight_bias: float,
    quant: QuantRecipe | None,
) -> None:
    """Returns if a tail may run on these arguments.

    Raises:
        ContractViolation: an argument breaks the contract; carries every violation found.
        UnsupportedError: the arguments are legal, but past the capacity or not what was declared.
    """
    violations = list(_residual_violations(capacity, residual)) or [
        *_norm_violations(capacity, residual, norm_weight),
        *check(output, _expectation(declaration, capacity, output, residual), tier="metadata"),
    ]
    if violations:
        raise ContractViolation(violations)
    refuse(declaration.name, _unsupported(declaration, capacity, output, residual, norm_weight, weight_bias, quant))


def _expectation(
    declaration: ConsumerDeclaration, capacity: TailCapacity, output: MoEOutput, residual: Tensor
) -> Expectation:
    """What any producer may hand over for this residual; what this consumer cannot read of that comes after."""
    weights = getattr(output.routed, "expert_weights", None)
    float32 = isinstance(weights, Tensor) and weights.dtype == torch.float32
    return Expectation(
        num_tokens=residual.shape[0],
        top_k=capacity.top_k,
        hidden_size=capacity.hidden_size,
        dtype=capacity.dtype,
        weights_dtype=torch.float32 if float32 else capacity.dtype,
        device=residual.device,
        route_major=declaration.route_major,
    )


def _residual_violations(capacity: TailCapacity, residual: Tensor) -> Iterator[Violation]:
    width, dtype = capacity.hidden_size, capacity.dtype
    if not isinstance(residual, Tensor) or residual.dim() != 2 or residual.shape[1] != width or residual.dtype != dtype:
        expected = f"{dtype_name(dtype)} [T, {width}]"
        yield Violation(clause="RED-3", field="residual", got=_describe(residual), expected=expected)


def _norm_violations(capacity: TailCapacity, residual: Tensor, norm_weight: Tensor) -> Iterator[Violation]:
    width, dtypes, device = capacity.hidden_size, (capacity.dtype, torch.float32), residual.device
    fits = isinstance(norm_weight, Tensor) and norm_weight.dtype in dtypes and norm_weight.device == device
    if not fits or norm_weight.shape != (width,):
        expected = f"{dtype_name(capacity.dtype)} or float32 [{width}] on {device}"
        yield Violation(clause="NORM-1", field="norm_weight", got=_describe(norm_weight), expected=expected)


def _describe(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__}"
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"


def _unsupported(
    declaration: ConsumerDeclaration,
    capacity: TailCapacity,
    output: MoEOutput,
    residual: Tensor,
    norm_weight: Tensor,
    weight_bias: float,
    quant: QuantRecipe | None,
) -> Iterator[Beyond]:
    """Legal arguments that this tail was not opened for, or that its declaration excludes."""
    if residual.shape[0] > capacity.max_tokens:
        yield Beyond(
            "CAP-1",
            f"{residual.shape[0]} tokens are past the {capacity.max_tokens} that the tail was opened for; "
            "open it with a larger TailCapacity.max_tokens or split the call",
        )
    if is_unfinalized(output.routed):
        yield from _unsupported_weights(declaration, capacity, cast(UnfinalizedMoEOutput, output.routed).expert_weights)
    elif not declaration.accepts_finalized:
        yield Beyond("DEFER-4", "a finalized routed tensor is not among what it declares to accept")
    if _dtype_kind(norm_weight, capacity) not in declaration.norm_weight_dtypes:
        yield Beyond("NORM-1", f"norm_weight of {dtype_name(norm_weight.dtype)} is not a declared norm weight dtype")
    if weight_bias != 0.0 and not declaration.weight_bias:
        yield Beyond("NORM-2", f"weight_bias {weight_bias} given, but the (1 + gamma) form is not declared")
    if quant is not None:
        yield from _unsupported_recipe(declaration, capacity, quant)


def _unsupported_weights(declaration: ConsumerDeclaration, capacity: TailCapacity, weights: Tensor) -> Iterator[Beyond]:
    if _dtype_kind(weights, capacity) not in declaration.weights_dtypes:
        yield Beyond(
            "WGT-2",
            f"expert_weights of {dtype_name(weights.dtype)} cannot be read; "
            f"declared: {', '.join(sorted(declaration.weights_dtypes))}",
        )


def _unsupported_recipe(
    declaration: ConsumerDeclaration, capacity: TailCapacity, quant: QuantRecipe
) -> Iterator[Beyond]:
    if quant.format not in declaration.quant_formats:
        yield Beyond("QUANT-1", f"{quant.format} is not among the declared {sorted(declaration.quant_formats)}")
    elif quant.format is QuantFormat.NVFP4 and capacity.hidden_size % NVFP4_BLOCK:
        yield Beyond(
            "QUANT-1",
            f"{quant.format} needs a hidden size that is a multiple of {NVFP4_BLOCK}, got {capacity.hidden_size}",
        )
    for field in ("scale", "global_scale"):
        value = getattr(quant, field)
        if not 0.0 < value < math.inf:
            yield Beyond("QUANT-1", f"{field} must be finite and positive, got {value}")


def _dtype_kind(tensor: Tensor, capacity: TailCapacity) -> str:
    """A tensor's dtype as declarations name it."""
    return "activation" if tensor.dtype == capacity.dtype else dtype_name(tensor.dtype)
