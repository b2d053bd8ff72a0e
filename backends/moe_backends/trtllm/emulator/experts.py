"""The two GEMMs on prepared weights: the layout is undone on the results, so a wrong preparation gives wrong numbers.

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

from moe_backends.reference.quantize import nvfp4_linear, nvfp4_values
from moe_backends.trtllm.bindings import SWIGLU
from moe_backends.trtllm.weights.blocks import from_blocks
from moe_backends.trtllm.weights.nvfp4 import restore, values
from moe_backends.trtllm.weights.rows import first_gemm_order, inverse, second_gemm_order


class Experts(Protocol):
    """One call's experts: from a token's input to its row, for one local expert at a time."""

    def rows(self, expert: int, tokens: Tensor) -> Tensor:
        """``[R, H']`` bfloat16 of the tokens with these indices."""
        ...


def run(experts: Experts, local_ids: Tensor, index: Tensor, out: Tensor) -> None:
    """Writes the row of every local route into ``out``; other rows are left alone."""
    top_k = local_ids.shape[1]
    routes = local_ids.flatten()
    order = torch.argsort(routes, stable=True)
    active, counts = torch.unique_consecutive(routes[order], return_counts=True)
    for expert, members in zip(active.tolist(), torch.split(order, counts.tolist()), strict=True):
        if expert >= 0:
            out[index[members].long()] = experts.rows(expert, members // top_k)


@dataclass(frozen=True)
class Bf16Experts:
    """bfloat16 throughout: ``arguments`` are the call's."""

    arguments: Mapping[str, Any]

    def rows(self, expert: int, tokens: Tensor) -> Tensor:
        """See Experts."""
        given = self.arguments
        x = given["hidden_states"][tokens].float()
        first, second = from_blocks(given["gemm1_weights"][expert]), from_blocks(given["gemm2_weights"][expert])
        gated = _gated(given)
        raw = x @ first.float().T
        raw = raw[:, inverse(first_gemm_order(raw.shape[1], gated=gated)).to(raw.device)]
        up, gate = raw.chunk(2, dim=1) if gated else (raw, None)
        inner = _activate(given, expert, up, gate).to(torch.bfloat16)
        out = inner.float() @ second.float().T
        return out[:, inverse(second_gemm_order(out.shape[1])).to(out.device)].to(torch.bfloat16)


@dataclass(frozen=True)
class Nvfp4Experts:
    """NVFP4 codes and block scales on both sides of both GEMMs: ``arguments`` are the call's."""

    arguments: Mapping[str, Any]

    def rows(self, expert: int, tokens: Tensor) -> Tensor:
        """See Experts."""
        given, gated = self.arguments, _gated(self.arguments)
        raw = self._inputs[tokens] @ self._values("gemm1", expert, gated).T
        gate_scale, scale = given["output1_scale_gate_scalar"][expert], given["output1_scale_scalar"][expert]
        if gated:
            up, gate = raw.chunk(2, dim=1)
            inner = _activate(given, expert, up, gate * gate_scale) * scale
        else:
            inner = _activate(given, expert, raw * gate_scale, None) * scale
        codes, block_scales = nvfp4_linear(inner, torch.ones((), device=inner.device))
        out = nvfp4_values(codes, block_scales) @ self._values("gemm2", expert, gated).T
        scale2: Tensor = given["output2_scale_scalar"][expert]
        return (out * scale2).to(torch.bfloat16)

    @cached_property
    def _inputs(self) -> Tensor:
        scales = self.arguments["hidden_states_scale"].view(torch.uint8)
        return nvfp4_values(self.arguments["hidden_states"], scales)

    def _values(self, name: str, expert: int, gated: bool) -> Tensor:
        codes, scales = self.arguments[f"{name}_weights"], self.arguments[f"{name}_weights_scale"]
        rows = codes.shape[1]
        order = first_gemm_order(rows, gated=gated) if name == "gemm1" else second_gemm_order(rows)
        part = slice(expert, expert + 1)
        return values(restore(codes[part], scales[part], order))[0]


def _gated(given: Mapping[str, Any]) -> bool:
    return int(given.get("activation_type", SWIGLU)) == SWIGLU


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
