"""The two GEMMs on prepared weights: the layout is undone, so a wrong preparation gives wrong numbers.

Accumulation is float32, as the kernels' is, in another order; the result of the activation is rounded to what the
second GEMM reads, the rows to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_backends.common.nvfp4 import nvfp4_linear, nvfp4_values

from .operands import Operands, gated, operands


class Experts(Protocol):
    """One call's experts, one local expert at a time; what lies between the GEMMs is done to all rows at once."""

    def first(self, expert: int, tokens: Tensor) -> Tensor:
        """The activation's result ``[R, I']`` float32 of the tokens with these indices."""
        ...

    def between(self, inner: Tensor) -> Tensor:
        """What the second GEMM reads of it, float32."""
        ...

    def second(self, expert: int, inner: Tensor) -> Tensor:
        """``[R, H']`` bfloat16."""
        ...


def run(experts: Experts, local_ids: Tensor, index: Tensor, out: Tensor) -> None:
    """Writes the row of every local route into ``out``; other rows are left alone."""
    top_k = local_ids.shape[1]
    routes = local_ids.flatten()
    order = torch.argsort(routes, stable=True)
    order = order[int((routes < 0).sum()) :]
    if not order.numel():
        return
    active, counts = torch.unique_consecutive(routes[order], return_counts=True)
    sizes = counts.tolist()
    groups = list(zip(active.tolist(), order.split(sizes), strict=True))
    inner = experts.between(torch.cat([experts.first(expert, members // top_k) for expert, members in groups]))
    for (expert, members), part in zip(groups, inner.split(sizes), strict=True):
        out[index[members].long()] = experts.second(expert, part)


@dataclass(frozen=True)
class _OfCall:
    arguments: Mapping[str, Any]

    def _operands(self, expert: int) -> Operands:
        return operands(self.arguments, expert)


@dataclass(frozen=True)
class Bf16Experts(_OfCall):
    """bfloat16 throughout: ``arguments`` are the call's."""

    def first(self, expert: int, tokens: Tensor) -> Tensor:
        """See Experts."""
        raw = self.arguments["hidden_states"][tokens].float() @ self._operands(expert).first.float().T
        up, gate = raw.chunk(2, dim=1) if gated(self.arguments) else (raw, None)
        return _activate(self.arguments, expert, up, gate)

    def between(self, inner: Tensor) -> Tensor:
        """Rounded to bfloat16."""
        return inner.to(torch.bfloat16).float()

    def second(self, expert: int, inner: Tensor) -> Tensor:
        """See Experts."""
        return (inner @ self._operands(expert).second.float().T).to(torch.bfloat16)


@dataclass(frozen=True)
class Nvfp4Experts(_OfCall):
    """NVFP4 codes and block scales on both sides of both GEMMs: ``arguments`` are the call's."""

    def first(self, expert: int, tokens: Tensor) -> Tensor:
        """See Experts; scaled to the intermediate's global scale."""
        mine = self._operands(expert)
        raw = self._inputs[tokens] @ mine.first.float().T
        gate_scale, scale = mine.scales["output1_scale_gate_scalar"], mine.scales["output1_scale_scalar"]
        if not gated(self.arguments):
            return _activate(self.arguments, expert, raw * gate_scale, None) * scale
        up, gate = raw.chunk(2, dim=1)
        return _activate(self.arguments, expert, up, gate * gate_scale) * scale

    def between(self, inner: Tensor) -> Tensor:
        """Quantised: codes times block scales."""
        return nvfp4_values(*nvfp4_linear(inner, torch.ones((), device=inner.device)))

    def second(self, expert: int, inner: Tensor) -> Tensor:
        """See Experts."""
        mine = self._operands(expert)
        return (inner @ mine.second.float().T * mine.scales["output2_scale_scalar"]).to(torch.bfloat16)

    @cached_property
    def _inputs(self) -> Tensor:
        return nvfp4_values(self.arguments["hidden_states"], self.arguments["hidden_states_scale"].view(torch.uint8))


def _activate(given: Mapping[str, Any], expert: int, up: Tensor, gate: Tensor | None) -> Tensor:
    """Swiglu with FlashInfer's optional alpha, beta and clamp, or relu squared, in float32."""
    if gate is None:
        return torch.relu(up).square()
    alpha, beta, limit = (_scalar(given, f"gemm1_{name}", expert) for name in ("alpha", "beta", "clamp_limit"))
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid
    return gate * sigmoid(gate if alpha is None else alpha * gate) * (up if beta is None else up + beta)


def _scalar(given: Mapping[str, Any], name: str, expert: int) -> float | None:
    values_ = given.get(name)
    return None if values_ is None else float(values_[expert])
