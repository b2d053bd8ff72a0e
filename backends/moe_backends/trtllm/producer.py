"""The TRTLLM producers: a layer prepared once, called through the entry points, answered in the contract's forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from moe_backends.common.layer_checks import require_batch, require_weights
from moe_backends.common.routing import require_routing, route
from moe_backends.common.weight_cache import WeightCache
from moe_contract import (
    Installation,
    LoadedProducer,
    MoEConfig,
    MoELayer,
    PrecomputedRouting,
    ProducerDeclaration,
    UnfinalizedMoEOutput,
    UnsupportedError,
)
from moe_contract.limits import require_layer

from .bindings import SEPARATE_SINCE, bound
from .calls import TUNE_MAX_TOKENS, Format, layer_arguments, padded_inputs
from .entry_points import EntryPoints
from .returns import Entry, EntryCall, RoutingInput, finalized, unfinalized
from .routing import logits_arguments, pack, precomputed_arguments, require_groups

Precomputed = Literal["packed", "separate"]
"""How routing from outside the kernel is handed over."""


class TrtllmProducer:
    """``trtllm_bf16_moe`` or ``trtllm_fp4_block_scale_moe`` under the contract.

    Args:
        declaration: what it says of itself, for the version of the entry points.
        entry_points: what is called.
        weight_format: bfloat16 or NVFP4.
        precomputed: the form of ids and weights from outside; packed weights are rounded to bfloat16.
        tune_max_num_tokens: the autotuner's largest bucket.
    """

    def __init__(
        self,
        declaration: ProducerDeclaration,
        entry_points: EntryPoints,
        weight_format: Format,
        *,
        precomputed: Precomputed = "packed",
        tune_max_num_tokens: int = TUNE_MAX_TOKENS,
    ) -> None:
        self.declaration = declaration
        self.entry_points = entry_points
        self.weight_format = weight_format
        self.precomputed = precomputed
        self.tune_max_num_tokens = tune_max_num_tokens
        self._prepared = WeightCache(weight_format.prepare)

    def unavailable(self, device: str) -> str:
        """Why it cannot run on ``device`` of this machine; empty where it can."""
        return self.entry_points.unavailable(torch.device(device))

    def installation(self) -> Installation:
        """What of FlashInfer is installed, and which calls it would not take."""
        return self.entry_points.installation()

    def load(self, layer: MoELayer, config: MoEConfig) -> LoadedProducer:
        """Prepares one rank's weights. ``config`` is read again at every call.

        Raises:
            ValueError: weights or routing parameters that do not fit together.
            UnsupportedError: beyond the declaration, or a machine that cannot run the kernels, with the reason.
        """
        require_weights(layer)
        require_routing(layer.routing, layer.num_experts)
        require_layer(self.declaration, layer)
        require_groups(layer.routing, layer.num_experts)
        if reason := self.entry_points.unavailable(layer.device):
            raise UnsupportedError(f"{self.declaration.name}: CAP-2: {reason}", clause="CAP-2")
        weights = self.entry_points.on_demand(layer.experts, self.weight_format)
        return LoadedTrtllm(self, layer, config, self._prepared.get(layer.experts) if weights is None else weights)


@dataclass
class LoadedTrtllm:
    """One rank's prepared layer."""

    producer: TrtllmProducer
    layer: MoELayer
    config: MoEConfig
    weights: Mapping[str, object]
    routing_replay_out: Tensor | None = field(default=None)
    """``[>= T, K]`` int16 of the engine's: each call writes the experts that it selected into its first T rows."""

    @torch.no_grad()
    def __call__(
        self, hidden_states: Tensor, router_logits: Tensor | PrecomputedRouting
    ) -> Tensor | UnfinalizedMoEOutput:
        """Routed output of this rank: the triple when deferring, ``[T, H]`` otherwise, neither of them reduced.

        Raises:
            ValueError: inputs that do not fit the layer.
            UnsupportedError: something that this FlashInfer version cannot be asked for.
            ReturnFormError: FlashInfer returned what is not known for this version.
        """
        producer, layer = self.producer, self.layer
        require_batch(layer, producer.declaration, hidden_states, router_logits)
        num_tokens = hidden_states.shape[0]
        if num_tokens == 0:
            # Answered here: the launcher divides by T on the host, which ends the process (OUT-2).
            return hidden_states.new_empty(0, layer.hidden_size)
        defer = self._defers(num_tokens)
        hidden_states, routing, call = self._routed(hidden_states.detach(), router_logits)
        arguments = {
            **self.weights,
            **layer_arguments(layer),
            **routing,
            **producer.weight_format.activation(layer.activation, layer.num_local_experts, layer.device),
            **producer.weight_format.inputs(
                padded_inputs(hidden_states, producer.weight_format.hidden_multiple), producer.entry_points
            ),
            "do_finalize": not defer,
            "tune_max_num_tokens": producer.tune_max_num_tokens,
            "routing_replay_out": self.routing_replay_out,
        }
        result = producer.entry_points.call(call.entry, bound(call.entry, call.version, arguments))
        return unfinalized(result, call) if defer else _logical(finalized(result, call), layer.hidden_size)

    def _defers(self, num_tokens: int) -> bool:
        able = self.producer.declaration.defers(self.layer.routing.method, self.layer.hidden_size)
        return able and self.config.should_defer(num_tokens)

    def _routed(
        self, hidden_states: Tensor, router_logits: Tensor | PrecomputedRouting
    ) -> tuple[Tensor, dict[str, object], EntryCall]:
        """Hidden states, the routing's keywords, and what is called."""
        layer, formats = self.layer, self.producer.weight_format
        if layer.routing.method.weights_input:
            hidden_states, router_logits = _input_weighted(hidden_states, router_logits, layer)
        if isinstance(router_logits, PrecomputedRouting):
            arguments, call = self._precomputed(router_logits, formats.routed_entry)
            return hidden_states, arguments, call
        arguments = logits_arguments(layer.routing, layer.num_experts, layer.device)
        arguments |= {"routing_logits": router_logits.detach(), "norm_topk_prob": layer.routing.norm_topk_prob}
        return (
            hidden_states,
            arguments,
            self._call(formats.logits_entry, RoutingInput.LOGITS, len(hidden_states), logits_dtype=router_logits.dtype),
        )

    def _precomputed(self, given: PrecomputedRouting, entry: Entry) -> tuple[dict[str, object], EntryCall]:
        arguments = precomputed_arguments() | ({"routing_bias": None} if entry.fp4 else {})
        if self.producer.precomputed == "packed":
            return arguments | {"topk_ids": pack(given)}, self._call(entry, RoutingInput.PACKED, len(given.ids))
        version = self.producer.entry_points.version
        if version < SEPARATE_SINCE[entry]:
            raise UnsupportedError(
                f"CAP-1: flashinfer {version} {entry.value} takes packed ids and weights only", clause="CAP-1"
            )
        dtype = torch.float32 if "float32" in self.producer.declaration.weights_dtypes else torch.bfloat16
        # A copy: the kernel hands the caller's own weights back, and the caller may reuse them (OUT-5).
        weights = given.weights.detach().to(dtype, copy=True).contiguous()
        arguments |= {"topk_ids": (given.ids.to(torch.int32).contiguous(), weights)}
        return arguments, self._call(entry, RoutingInput.SEPARATE, len(given.ids), given_weights_dtype=dtype)

    def _call(self, entry: Entry, routing: RoutingInput, num_tokens: int, **dtypes: torch.dtype) -> EntryCall:
        return EntryCall(
            self.producer.entry_points.version, entry, routing, num_tokens, self.layer.routing.top_k, **dtypes
        )


def _input_weighted(
    hidden_states: Tensor, router_logits: Tensor | PrecomputedRouting, layer: MoELayer
) -> tuple[Tensor, PrecomputedRouting]:
    """Llama 4's weight on the expert's input, which these kernels do not do: routed here, applied here, 1 left over."""
    routed = route(layer.routing, router_logits, fold_scale=False, weights_dtype=torch.float32)
    weighted = (hidden_states.float() * routed.weights).to(hidden_states.dtype)
    return weighted, PrecomputedRouting(routed.ids, torch.ones_like(routed.weights))


def _logical(output: Tensor, hidden_size: int) -> Tensor:
    """``[T, H]`` without padded columns, compact."""
    return output if output.shape[1] == hidden_size else output[:, :hidden_size].contiguous()
