"""Synthetic outputs of N ranks for a tail: every rank's data differs, every unreferenced row is poisoned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_conformance.cases import strata
from moe_conformance.cases.case import TailCase
from moe_conformance.cases.streams import Purpose, stream
from moe_contract import MoEOutput, QuantRecipe, TailCapacity, UnfinalizedMoEOutput
from moe_contract.dtypes import torch_dtype
from moe_contract.outputs import is_unfinalized, require_unfinalized
from moe_contract.quant import FP4_MAX, FP8_MAX, QuantFormat

Routed = Tensor | UnfinalizedMoEOutput
PADDING_ROWS = 5
"""Unreferenced rows among the permuted rows; odd, so that P is a multiple of nothing convenient."""


@dataclass(frozen=True)
class TailInputs:
    """What N ranks hand to a tail. ``outputs`` has one MoEOutput a rank; the rest is the same on every rank."""

    outputs: tuple[MoEOutput, ...]
    residual: Tensor
    norm_weight: Tensor
    eps: float
    weight_bias: float = 0.0
    quant: QuantRecipe | None = None

    def with_outputs(self, outputs: list[MoEOutput]) -> TailInputs:
        """The same inputs around other outputs."""
        return replace(self, outputs=tuple(outputs))

    def to(self, device: torch.device) -> TailInputs:
        """A copy on ``device``."""
        return replace(
            self,
            outputs=tuple(move_output(output, device) for output in self.outputs),
            residual=self.residual.to(device),
            norm_weight=self.norm_weight.to(device),
        )

    def capacity(self, case: TailCase) -> TailCapacity:
        """A capacity that just holds this call."""
        return TailCapacity(max(1, case.tokens), case.hidden_size, case.top_k, torch_dtype(case.dtype))


def make_tail_inputs(case: TailCase) -> TailInputs:
    """The inputs of a case; the same case gives the same bits on every machine."""
    dtype = torch_dtype(case.dtype)
    common = stream(case.seed, Purpose.TAIL, case.ranks)
    shape = (case.tokens, case.hidden_size)
    outputs = tuple(_rank_output(case, rank) for rank in range(case.ranks))
    residual = strata.residual(case, shape, common).to(dtype)
    return TailInputs(
        outputs=outputs,
        residual=residual,
        norm_weight=_norm_weight(case, common),
        eps=case.eps,
        weight_bias=case.weight_bias,
        quant=_recipe(case),
    )


def _rank_output(case: TailCase, rank: int) -> MoEOutput:
    generator = stream(case.seed, Purpose.TAIL, rank)
    dtype = torch_dtype(case.dtype)
    weights_dtype = torch.float32 if case.weights_dtype == "float32" else dtype
    terms = strata.local_terms(case, rank, generator)
    shared = terms.shared.to(dtype) if case.shared else None
    if case.form == "finalized":
        return MoEOutput(terms.rows[:, 0].to(dtype).contiguous(), shared, case.scale)
    present = _present(case, generator)
    rows, index = _permute(terms.rows.to(dtype), present, case.route_major, generator)
    weights = terms.weights.to(weights_dtype).contiguous()
    return MoEOutput(UnfinalizedMoEOutput(rows, weights, index, case.route_major), shared, case.scale)


def _present(case: TailCase, generator: torch.Generator) -> Tensor:
    """``[T, K]`` bool: the slots that are on this rank."""
    shape = (case.tokens, case.top_k)
    present = torch.ones(shape, dtype=torch.bool)
    if case.absent == "all":
        return ~present
    if case.absent == "token":
        present[-1:] = False
    if case.absent == "quarter":
        present = torch.rand(shape, generator=generator) >= 0.25
        # At least one slot of each kind, wherever there are two, so that the case is about something.
        flat = present.view(-1)
        if flat.numel() > 1:
            flat[-1], flat[0] = False, True
    return present


def _permute(routes: Tensor, present: Tensor, route_major: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``routes [T, K, H]`` as permuted rows and map. The first and last row are referenced where rows are absent,
    so that a -1 read as an index finds a plausible row and not a poisoned one; otherwise poison lies all around."""
    tokens, top_k, hidden = routes.shape
    if route_major:
        index = torch.arange(tokens * top_k, dtype=torch.int32).view(tokens, top_k)
        rows = torch.where(present.unsqueeze(-1), routes, math.nan).view(tokens * top_k, hidden)
        return rows.contiguous(), torch.where(present, index, -1)
    valid = int(present.sum())
    total = valid + PADDING_ROWS
    places = torch.randperm(total, generator=generator)[:valid]
    if valid and not bool(present.all()):
        places = _including_ends(valid, total, generator)
    rows = torch.full((total, hidden), math.nan, dtype=routes.dtype)
    rows[places] = routes[present]
    index = torch.full((tokens, top_k), -1, dtype=torch.int32)
    index[present] = places.to(torch.int32)
    return rows, index


def _including_ends(count: int, total: int, generator: torch.Generator) -> Tensor:
    """``count`` distinct rows of ``total`` in random order; the last and, from two on, the first are among them."""
    ends = torch.tensor([total - 1, 0][:count])
    inner = 1 + torch.randperm(total - 2, generator=generator)[: count - len(ends)]
    places = torch.cat([ends, inner])
    return places[torch.randperm(count, generator=generator)]


def _norm_weight(case: TailCase, generator: torch.Generator) -> Tensor:
    dtype = torch.float32 if case.norm_weight_dtype == "float32" else torch_dtype(case.dtype)
    if case.norm_weight == "ones":
        return torch.ones(case.hidden_size, dtype=dtype)
    return (1.0 + 0.25 * torch.randn(case.hidden_size, generator=generator)).to(dtype)


def _recipe(case: TailCase) -> QuantRecipe | None:
    """Scales that use most of each format's range for a normed row, whose largest element is below 8 in practice."""
    if case.quant is None:
        return None
    if case.quant is QuantFormat.FP8_STATIC:
        return QuantRecipe(case.quant, scale=8.0 / FP8_MAX)
    return QuantRecipe(case.quant, global_scale=FP8_MAX * FP4_MAX / 8.0, scale_layout=case.scale_layout)


def move_output(output: MoEOutput, device: torch.device) -> MoEOutput:
    """The output with its tensors on ``device``."""
    return map_tensors(output, lambda tensor: tensor.to(device))


def map_tensors(output: MoEOutput, change: Callable[[Tensor], Tensor]) -> MoEOutput:
    """The output with ``change`` made to each of its tensors."""
    shared = output.shared_output
    routed = map_routed(output.routed, change)
    return MoEOutput(routed, None if shared is None else change(shared), output.routed_scaling_factor)


def map_routed(routed: Routed, change: Callable[[Tensor], Tensor]) -> Routed:
    """The routed part with ``change`` made to each of its tensors; what is neither of its forms stays as it is."""
    if isinstance(routed, Tensor):
        return change(routed)
    if not is_unfinalized(routed):
        return routed
    rows, weights, index = routed.gemm2_permuted, routed.expert_weights, routed.expanded_idx_to_permuted_idx
    return UnfinalizedMoEOutput(change(rows), change(weights), change(index), getattr(routed, "route_major", False))


def with_routed(inputs: TailInputs, change: Callable[[UnfinalizedMoEOutput], UnfinalizedMoEOutput]) -> TailInputs:
    """The same inputs with every rank's triple changed."""
    return inputs.with_outputs(
        [replace(output, routed=change(require_unfinalized(output))) for output in inputs.outputs]
    )
