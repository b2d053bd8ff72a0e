"""From a loaded layer and one batch to the keywords of an entry point, for both weight formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_contract import Activation, ExpertWeights, MoELayer
from moe_contract.activations import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT
from moe_contract.quant import NVFP4_HIDDEN_SCALE

from .bindings import ACTIVATIONS, BLOCK_MAJOR_K
from .entry_points import EntryPoints
from .returns import Entry
from .weights import bf16, nvfp4

TUNE_MAX_TOKENS = 8192
"""The largest bucket that FlashInfer's autotuner measures, its own default; larger batches use that bucket's kernel."""


class Format(Protocol):
    """A weight format: how a layer is prepared, and what of a call depends on it."""

    @property
    def logits_entry(self) -> Entry:
        """The entry point that routes."""
        ...

    @property
    def routed_entry(self) -> Entry:
        """The entry point that is given ids and weights."""
        ...

    @property
    def hidden_multiple(self) -> int:
        """What the hidden size is padded to a multiple of."""
        ...

    def prepare(self, weights: ExpertWeights) -> Mapping[str, object]:
        """The weights' keywords, padded intermediate size included."""
        ...

    def inputs(self, hidden_states: Tensor, entry_points: EntryPoints) -> dict[str, object]:
        """The hidden states' keywords, from ``[T, H']`` bfloat16."""
        ...

    def activation(self, activation: Activation, experts: int, device: torch.device) -> dict[str, object]:
        """The activation's keywords."""
        ...


@dataclass(frozen=True)
class Bf16Format:
    """bfloat16 weights and activations."""

    logits_entry: Entry = Entry.BF16
    routed_entry: Entry = Entry.BF16_ROUTED
    hidden_multiple: int = bf16.HIDDEN_MULTIPLE

    def prepare(self, weights: ExpertWeights) -> Mapping[str, object]:
        """See Format."""
        prepared = bf16.prepare(weights)
        return {
            "gemm1_weights": prepared.gemm1,
            "gemm2_weights": prepared.gemm2,
            "intermediate_size": prepared.intermediate_size,
            "use_shuffled_weight": True,
            "weight_layout": BLOCK_MAJOR_K,
        }

    def inputs(self, hidden_states: Tensor, entry_points: EntryPoints) -> dict[str, object]:
        """See Format."""
        return {"hidden_states": hidden_states}

    def activation(self, activation: Activation, experts: int, device: torch.device) -> dict[str, object]:
        """gpt-oss's function is Swiglu with alpha, beta and clamp."""
        gate: dict[str, object] = {"gemm1_alpha": None, "gemm1_beta": None, "gemm1_clamp_limit": None}
        if activation is Activation.SWIGLU_OAI:
            for name, value in zip(gate, (SWIGLU_OAI_ALPHA, 1.0, SWIGLU_OAI_LIMIT), strict=True):
                gate[name] = torch.full((experts,), value, dtype=torch.float32, device=device)
        return {"activation_type": ACTIVATIONS[activation], **gate}


@dataclass(frozen=True)
class Nvfp4Format:
    """NVFP4 weights and activations."""

    logits_entry: Entry = Entry.FP4
    routed_entry: Entry = Entry.FP4_ROUTED
    hidden_multiple: int = nvfp4.HIDDEN_MULTIPLE

    def prepare(self, weights: ExpertWeights) -> Mapping[str, object]:
        """See Format."""
        prepared = nvfp4.prepare(weights)
        return {
            "gemm1_weights": prepared.gemm1,
            "gemm1_weights_scale": prepared.gemm1_scale,
            "gemm2_weights": prepared.gemm2,
            "gemm2_weights_scale": prepared.gemm2_scale,
            "output1_scale_scalar": prepared.output1_scale,
            "output1_scale_gate_scalar": prepared.output1_gate_scale,
            "output2_scale_scalar": prepared.output2_scale,
            "intermediate_size": prepared.intermediate_size,
        }

    def inputs(self, hidden_states: Tensor, entry_points: EntryPoints) -> dict[str, object]:
        """Quantised with the contract's global scale."""
        codes, scales = entry_points.quantize(hidden_states, NVFP4_HIDDEN_SCALE)
        return {"hidden_states": codes, "hidden_states_scale": scales}

    def activation(self, activation: Activation, experts: int, device: torch.device) -> dict[str, object]:
        """No biases and no gate parameters: in which units NVFP4 kernels take them differs from version to version."""
        absent = ("gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias")
        return {"activation_type": ACTIVATIONS[activation], **dict.fromkeys(absent)}


def layer_arguments(layer: MoELayer) -> dict[str, object]:
    """The keywords that say which experts this rank holds."""
    return {
        "num_experts": layer.num_experts,
        "top_k": layer.routing.top_k,
        "local_expert_offset": layer.first_expert,
        "local_num_experts": layer.num_local_experts,
    }


def padded_inputs(hidden_states: Tensor, multiple: int) -> Tensor:
    """``[T, H']`` with zeros up to the kernels' multiple."""
    return pad(hidden_states, (0, -hidden_states.shape[1] % multiple))
