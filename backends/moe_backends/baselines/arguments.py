"""What the baselines share: their declaration, the check of a call, and a call's parts."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from moe_backends.tail_inputs import as_moe_output, refuse_bad_inputs
from moe_contract import ConsumerDeclaration, MoEOutput, RankGroup, TailCapacity, UnsupportedError
from moe_contract.limits import require_capacity
from moe_contract.quant import QuantRecipe


def declare(name: str, **differences: object) -> ConsumerDeclaration:
    """A tail in float32 (profile C) that runs on a GPU; keywords replace or add fields."""
    fields: dict[str, object] = {
        "name": name,
        "version": "1",
        "devices": {"cuda"},
        "profile": "C",
        "weights_dtypes": {"activation", "float32"},
        "route_major": True,
    }
    return ConsumerDeclaration.model_validate(fields | differences)


def refuse_beyond(declaration: ConsumerDeclaration, group: RankGroup, capacity: TailCapacity) -> None:
    """Raises UnsupportedError outside the declared limits and where triton is not installed."""
    require_capacity(declaration, group, capacity)
    if find_spec("triton") is None:
        raise UnsupportedError(f"{declaration.name}: needs triton, which torch's CUDA builds bring; not installed here")


@dataclass(frozen=True)
class Parts:
    """One rank's call as kernels take it, contiguous; a finalized ``routed`` is K = 1 with weights of 1."""

    rows: Tensor
    """``[P, H]`` activation dtype."""
    weights: Tensor
    """``[T, K]`` activation dtype or float32."""
    index: Tensor
    """``[T, K]`` int32: the row of each route, -1 for none."""
    shared: Tensor | None
    """``[T, H]`` activation dtype."""
    scale: float
    """The routed scaling factor."""


def checked_parts(
    declaration: ConsumerDeclaration,
    capacity: TailCapacity,
    output: MoEOutput,
    residual: Tensor,
    norm_weight: Tensor,
    weight_bias: float,
    quant: QuantRecipe | None,
) -> Parts:
    """The parts of a legal call; raises as tail_inputs.refuse_bad_inputs does."""
    known = as_moe_output(output)
    refuse_bad_inputs(declaration, capacity, known, residual, norm_weight, weight_bias, quant)
    shared = None if known.shared_output is None else known.shared_output.contiguous()
    routed, scale = known.routed, float(known.routed_scaling_factor)
    if isinstance(routed, Tensor):
        tokens = routed.shape[0]
        ones = torch.ones(tokens, 1, dtype=routed.dtype, device=routed.device)
        index = torch.arange(tokens, dtype=torch.int32, device=routed.device).unsqueeze(1)
        return Parts(routed.contiguous(), ones, index, shared, scale)
    rows, weights = routed.gemm2_permuted.contiguous(), routed.expert_weights.contiguous()
    return Parts(rows, weights, routed.expanded_idx_to_permuted_idx.contiguous(), shared, scale)
