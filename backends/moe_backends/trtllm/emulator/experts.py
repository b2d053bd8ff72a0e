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
from moe_backends.weight_cache import TensorCache

LARGEST_KEPT = 2**24
"""Bytes of codes up to which their values are kept from call to call; of larger ones each expert's are made when it is
used, so that no second copy of a real model's weights exists."""
_KNOWN: TensorCache[Tensor] = TensorCache()


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
class Bf16Experts:
    """bfloat16 throughout: ``arguments`` are the call's."""

    arguments: Mapping[str, Any]

    def first(self, expert: int, tokens: Tensor) -> Tensor:
        """See Experts."""
        given, gated = self.arguments, _gated(self.arguments)
        raw = given["hidden_states"][tokens].float() @ from_blocks(given["gemm1_weights"][expert]).float().T
        raw = raw[:, inverse(first_gemm_order(raw.shape[1], gated=gated)).to(raw.device)]
        up, gate = raw.chunk(2, dim=1) if gated else (raw, None)
        return _activate(given, expert, up, gate)

    def between(self, inner: Tensor) -> Tensor:
        """Rounded to bfloat16."""
        return inner.to(torch.bfloat16).float()

    def second(self, expert: int, inner: Tensor) -> Tensor:
        """See Experts."""
        out = inner @ from_blocks(self.arguments["gemm2_weights"][expert]).float().T
        return out[:, inverse(second_gemm_order(out.shape[1])).to(out.device)].to(torch.bfloat16)


@dataclass(frozen=True)
class Nvfp4Experts:
    """NVFP4 codes and block scales on both sides of both GEMMs: ``arguments`` are the call's."""

    arguments: Mapping[str, Any]

    def first(self, expert: int, tokens: Tensor) -> Tensor:
        """See Experts; scaled to the intermediate's global scale."""
        given, gated = self.arguments, _gated(self.arguments)
        raw = self._inputs[tokens] @ self._values("gemm1", expert).T
        gate_scale: Tensor = given["output1_scale_gate_scalar"][expert]
        scale: Tensor = given["output1_scale_scalar"][expert]
        if not gated:
            return _activate(given, expert, raw * gate_scale, None) * scale
        up, gate = raw.chunk(2, dim=1)
        return _activate(given, expert, up, gate * gate_scale) * scale

    def between(self, inner: Tensor) -> Tensor:
        """Quantised: codes times block scales."""
        return nvfp4_values(*nvfp4_linear(inner, torch.ones((), device=inner.device)))

    def second(self, expert: int, inner: Tensor) -> Tensor:
        """See Experts."""
        scale: Tensor = self.arguments["output2_scale_scalar"][expert]
        return (inner @ self._values("gemm2", expert).T * scale).to(torch.bfloat16)

    @cached_property
    def _inputs(self) -> Tensor:
        return nvfp4_values(self.arguments["hidden_states"], self.arguments["hidden_states_scale"].view(torch.uint8))

    def _values(self, name: str, expert: int) -> Tensor:
        """Codes times block scales of one expert, rows in canonical order, float32."""
        codes, scales = self.arguments[f"{name}_weights"], self.arguments[f"{name}_weights_scale"]
        rows = codes.shape[1]
        order = first_gemm_order(rows, gated=_gated(self.arguments)) if name == "gemm1" else second_gemm_order(rows)
        if codes.numel() > LARGEST_KEPT:
            return values(restore(codes[expert, None], scales[expert, None], order))[0]
        # Products of a code and a block scale have 6 significant bits, so bfloat16 holds them.
        made = _KNOWN.get((codes, scales), lambda: values(restore(codes, scales, order)).to(torch.bfloat16))
        return made[expert].float()


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
