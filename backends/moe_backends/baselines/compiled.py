"""One rank's tail as torch.compile makes it from a few lines of PyTorch; nothing is exchanged."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from moe_contract import ConsumerDeclaration, MoEOutput, RankGroup, TailCapacity, TailOutput
from moe_contract.quant import QuantRecipe

from .arguments import checked_parts, declare, refuse_beyond


def _tail(
    rows: Tensor, weights: Tensor, index: Tensor, shared: Tensor | None, residual: Tensor, gamma: Tensor,
    scale: float, eps: float, weight_bias: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Residual and norm ``[T, H]``, activation dtype, of profile C in plain torch.

    ``rows [P, H]``, ``weights [T, K]``, ``index [T, K]`` int32 as Parts holds them; ``shared`` and ``residual``
    ``[T, H]``, ``gamma [H]``.
    """
    total = torch.zeros(residual.shape, dtype=torch.float32, device=residual.device)
    for slot in range(index.shape[1]):
        at = index[:, slot].long()
        term = rows[at.clamp(min=0)].float() * weights[:, slot].float()[:, None]
        total = total + torch.where((at >= 0)[:, None], term, 0.0)
    total = total * scale
    if shared is not None:
        total = total + shared.float()
    residual_out = (total.to(residual.dtype).float() + residual.float()).to(residual.dtype)
    x = residual_out.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return residual_out, (x * (gamma.float() + weight_bias)).to(residual.dtype)


DECLARATION = declare("compile-local", world_sizes={1})

MOST_SHAPES = 1024
"""Compilations that torch allows one function in this process; its own limit is 8, a bench has more shapes."""


@lru_cache(maxsize=1)
def _compiled() -> Any:
    """Compiled for each shape that it meets; emulating casts, since inductor would keep float32 across them."""
    return torch.compile(_tail, fullgraph=True, dynamic=False, options={"emulate_precision_casts": True})


@dataclass(frozen=True)
class CompiledLocal:
    """One rank; what a compiler makes of the formula."""

    declaration: ConsumerDeclaration = DECLARATION

    def open(self, group: RankGroup, capacity: TailCapacity) -> CompiledTail:
        """Raises UnsupportedError outside the declared limits and without triton."""
        refuse_beyond(self.declaration, group, capacity)
        limit = torch._dynamo.config.recompile_limit
        torch._dynamo.config.recompile_limit = max(limit, MOST_SHAPES)
        return CompiledTail(self.declaration, capacity)

    def open_solo(self, group: RankGroup, capacity: TailCapacity, published: list[Tensor]) -> CompiledTail:
        """As ``open``: there are no peers."""
        return self.open(group, capacity)


@dataclass(frozen=True)
class CompiledTail:
    """One rank's end."""

    declaration: ConsumerDeclaration
    capacity: TailCapacity

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
        """Raises ContractViolation and UnsupportedError as tail_inputs says."""
        parts = checked_parts(self.declaration, self.capacity, output, residual, norm_weight, weight_bias, quant)
        found = _compiled()(
            parts.rows, parts.weights, parts.index, parts.shared, residual, norm_weight, parts.scale, eps, weight_bias
        )
        return TailOutput(*found)

    def close(self) -> None:
        """Nothing to release."""
