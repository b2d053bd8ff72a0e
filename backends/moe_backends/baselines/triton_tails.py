"""Tails of plain Triton kernels: one kernel where there is one rank, two around an exchange where there are more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_contract import ConsumerDeclaration, MoEOutput, RankGroup, TailCapacity, TailOutput
from moe_contract.quant import QuantRecipe

from .arguments import Parts, checked_parts, declare, refuse_beyond

LOCAL = declare("triton-local", world_sizes={1})
# The group's collectives may synchronise with the host, which no graph can hold.
SPLIT = declare("triton-split", graph_capturable=False)
Exchange = Callable[[Tensor], Tensor]
"""From the own contribution ``[T, H]`` to every rank's, ``[N, slots, H]`` in rank order."""


@dataclass(frozen=True)
class TritonLocal:
    """One rank, one kernel: what finalize, residual and norm cost when nothing is exchanged."""

    declaration: ConsumerDeclaration = LOCAL

    def open(self, group: RankGroup, capacity: TailCapacity) -> TritonTail:
        """Raises UnsupportedError outside the declared limits and without triton."""
        refuse_beyond(self.declaration, group, capacity)
        return TritonTail(self.declaration, capacity, None)

    def open_solo(self, group: RankGroup, capacity: TailCapacity, published: list[Tensor]) -> TritonTail:
        """As ``open``: there are no peers."""
        return self.open(group, capacity)


@dataclass(frozen=True)
class TritonSplit:
    """Finalize; exchange through the group; add the ranks, residual and norm. Each a launch of its own."""

    declaration: ConsumerDeclaration = SPLIT

    def open(self, group: RankGroup, capacity: TailCapacity) -> TritonTail:
        """Raises UnsupportedError outside the declared limits and without triton."""
        refuse_beyond(self.declaration, group, capacity)
        return TritonTail(self.declaration, capacity, lambda own: torch.stack(group.all_gather(own)))

    def open_solo(self, group: RankGroup, capacity: TailCapacity, published: list[Tensor]) -> TritonTail:
        """An exchange that costs nothing: the peers' contributions already lie where the second kernel reads them.

        What is timed is therefore a lower limit of every split tail with these two kernels.
        """
        refuse_beyond(self.declaration, group, capacity)
        slots = torch.stack(published)

        def exchange(own: Tensor) -> Tensor:
            return slots

        return TritonTail(self.declaration, capacity, exchange, slots[group.rank])


class TritonTail:
    """One rank's end; ``exchange`` None fuses both kernels, ``own`` is where a solo tail publishes."""

    def __init__(
        self,
        declaration: ConsumerDeclaration,
        capacity: TailCapacity,
        exchange: Exchange | None,
        own: Tensor | None = None,
    ) -> None:
        """Use the consumers' open."""
        self.declaration = declaration
        self._capacity = capacity
        self._exchange = exchange
        self._own = own

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
        """Launches on the current stream. Raises ContractViolation and UnsupportedError as tail_inputs says."""
        parts = checked_parts(self.declaration, self._capacity, output, residual, norm_weight, weight_bias, quant)
        residual_out, norm_out = torch.empty_like(residual), torch.empty_like(residual)
        if residual.shape[0]:
            given = (residual.contiguous(), norm_weight.contiguous(), residual_out, norm_out)
            self._launch(parts, *given, eps, weight_bias)
        return TailOutput(residual_out, norm_out)

    def close(self) -> None:
        """Nothing but tensors to release."""
        self._own = self._exchange = None

    def _launch(
        self, parts: Parts, residual: Tensor, gamma: Tensor, residual_out: Tensor, norm_out: Tensor,
        eps: float, weight_bias: float,
    ) -> None:  # fmt: skip
        from . import kernels

        given = (parts.rows, parts.weights, parts.index, parts.shared)
        if self._exchange is None:
            kernels.finalize_norm(
                *given, residual, gamma, residual_out, norm_out, scale=parts.scale, eps=eps, weight_bias=weight_bias
            )
            return
        own = torch.empty_like(residual) if self._own is None else self._own[: residual.shape[0]]
        kernels.finalize(*given, own, scale=parts.scale)
        gathered = self._exchange(own)
        kernels.add_ranks_norm(gathered, residual, gamma, residual_out, norm_out, eps=eps, weight_bias=weight_bias)
