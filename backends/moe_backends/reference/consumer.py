"""The reference consumer: the fused tail in plain PyTorch, one operation at a time, in each rounding profile."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_backends.tail_inputs import as_moe_output, refuse_bad_inputs
from moe_contract import (
    ConsumerDeclaration,
    MoEOutput,
    QuantFormat,
    QuantRecipe,
    RankGroup,
    RoundingProfile,
    TailCapacity,
    TailOutput,
)
from moe_contract.limits import require_capacity

from .local_sum import local_sum
from .quantize import quantize
from .rmsnorm import rms_norm


def _declare(name: str, profile: RoundingProfile) -> ConsumerDeclaration:
    return ConsumerDeclaration(
        name=name,
        version="1",
        profile=profile,
        weights_dtypes=frozenset({"activation", "float32"}),
        quant_formats=frozenset(QuantFormat),
        route_major=True,
        compilable=True,
    )


PROFILE_A = _declare("reference-a", RoundingProfile.STEP_ROUNDED)
"""Rounded to the activation dtype at every step."""
PROFILE_B = _declare("reference-b", RoundingProfile.LOCAL_FP32)
"""fp32 within a rank, rounded at each rank."""
PROFILE_C = _declare("reference", RoundingProfile.FP32)
"""fp32 throughout; the default reference."""


@dataclass(frozen=True)
class ReferenceConsumer:
    """The fused tail in plain PyTorch, with the rounding profile and scale placement that it is told to declare."""

    declaration: ConsumerDeclaration = PROFILE_C

    def __post_init__(self) -> None:
        """Refuses a declaration that this implementation would not honour."""
        if self.declaration.in_place_residual:
            raise ValueError("the reference consumer never writes its inputs; declare in_place_residual=False")

    def open(self, group: RankGroup, capacity: TailCapacity) -> ReferenceTail:
        """A tail over ``group``. It needs no workspace, so nothing collective happens here.

        Raises:
            UnsupportedError: the group or the capacity lies outside the declared limits (CAP-1, CAP-2).
        """
        require_capacity(self.declaration, group, capacity)
        return ReferenceTail(self.declaration, group, capacity)


class ReferenceTail:
    """One rank's end of the reference tail."""

    def __init__(self, declaration: ConsumerDeclaration, group: RankGroup, capacity: TailCapacity) -> None:
        """Use ReferenceConsumer.open, which checks the arguments against each other."""
        self.declaration = declaration
        self.group = group
        self.capacity = capacity

    def __call__(
        self,
        output: MoEOutput,
        residual: Tensor,
        norm_weight: Tensor,
        *,
        eps: float,
        weight_bias: float = 0.0,
        quant: QuantRecipe | None = None,
    ) -> TailOutput:
        """Top-k sum, scale, shared output, reduction, residual and RMSNorm of one layer. Collective for N > 1.

        Every refusal depends on metadata alone and comes before the first collective, so that ranks which were
        called alike refuse alike.

        Raises:
            ContractViolation: an argument breaks the contract.
            UnsupportedError: the arguments are legal, but past the capacity or not what was declared.
        """
        output = as_moe_output(output)
        refuse_bad_inputs(self.declaration, self.capacity, output, residual, norm_weight, weight_bias, quant)
        # A model's norm weight is a parameter; the tail is inference only.
        with torch.no_grad():
            local = local_sum(output, self.declaration.profile, self.declaration.scale_placement)
            residual_out = self._reduce(local, residual)
            norm_out = rms_norm(residual_out, norm_weight, eps=eps, weight_bias=weight_bias)
            if quant is None:
                return TailOutput(residual_out, norm_out)
            quant_out, quant_scale = quantize(norm_out, quant)
            return TailOutput(residual_out, norm_out, quant_out, quant_scale)

    def close(self) -> None:
        """Nothing to release."""

    def _reduce(self, local: Tensor, residual: Tensor) -> Tensor:
        """The sum of every rank's published contribution, in rank order, plus the residual."""
        published = [local] if self.group.size == 1 else self.group.all_gather(local)
        rounds_at_each_rank = self.declaration.profile in (RoundingProfile.STEP_ROUNDED, RoundingProfile.LOCAL_FP32)
        # Profile D leaves the order to the switch; rank order is one of the orders that it may take.
        accumulator = residual.dtype if rounds_at_each_rank else torch.float32
        total = published[0].to(accumulator)
        for contribution in published[1:]:
            total = total + contribution.to(accumulator)
        return (total + residual.to(accumulator)).to(residual.dtype)
