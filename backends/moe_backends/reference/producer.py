"""The reference producer: plain PyTorch, every routing method, deferred or finalized."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_backends.common.layer_checks import require_batch
from moe_backends.common.routing import RoutedTokens, route
from moe_contract import (
    CONTRACT_VERSION,
    LoadedProducer,
    MoEConfig,
    MoELayer,
    PrecomputedRouting,
    ProducerDeclaration,
    UnfinalizedMoEOutput,
)
from moe_contract.completion import finalize
from moe_contract.declarations import ALL_ROUTING_METHODS, FOLDING_METHODS, INPUT_WEIGHTED_METHODS
from moe_contract.quant import NVFP4_BLOCK

from .experts import expert_rows
from .limits import require_declaration, require_loadable
from .nvfp4_experts import nvfp4_rows
from .permutation import Permutation, expert_major, route_major

TILE = 8
"""Rows per expert segment are a multiple of this; the smallest tile of FlashInfer's TRTLLM kernels."""


def declare(name: str, **differences: object) -> ProducerDeclaration:
    """The reference producer's declaration under ``name``; keywords replace its fields."""
    fields: dict[str, object] = {
        "name": name,
        "version": CONTRACT_VERSION,
        "tile": TILE,
        # The loop over active experts reads their ids on the host.
        "graph_capturable": False,
        "compilable": False,
        "intermediate_dtype": "float32",
    }
    return ProducerDeclaration.model_validate(fields | differences)


REFERENCE = declare("reference")
"""The scale is left to the finalizer, whatever the routing method."""
ROUTE_MAJOR = declare("reference-route-major", route_major=True, tile=None)
"""Contract 1.1's route-major rows."""
FOLDED = declare("reference-folded", folds_scale=FOLDING_METHODS)
"""The scale is folded into the weights of the methods for which FlashInfer's routing does so."""
FP32_WEIGHTS = declare("reference-fp32-weights", weights_dtypes=frozenset({"float32"}))
"""Contract 1.1's float32 routing weights."""


NVFP4 = declare(
    "reference-nvfp4",
    quantization="nvfp4",
    dtypes=frozenset({"bfloat16"}),
    hidden_size_multiple=NVFP4_BLOCK,
    # A weighted input would be quantised from a rounding that the contract leaves open.
    routing_methods=ALL_ROUTING_METHODS - INPUT_WEIGHTED_METHODS,
)
"""Weights and inputs of both GEMMs in NVFP4, as moe_contract.quant defines the codes; bfloat16 as NVFP4 kernels are."""


class ReferenceProducer:
    """A producer that keeps every clause in the plainest way. Its declaration picks the variant."""

    def __init__(self, declaration: ProducerDeclaration = REFERENCE) -> None:
        """Refuses, with a ValueError, a declaration that this producer would not keep."""
        require_declaration(declaration)
        self.declaration = declaration

    def load(self, layer: MoELayer, config: MoEConfig) -> LoadedProducer:
        """One rank's part of a layer, ready to run. ``config`` is read again at every call.

        Raises:
            ValueError: weights or routing parameters that do not fit together.
            UnsupportedError: a layer beyond the declared limits.
        """
        require_loadable(layer, self.declaration)
        return LoadedReferenceProducer(self.declaration, layer, config)


@dataclass(frozen=True)
class LoadedReferenceProducer:
    """One rank's part of a layer and the config that says, at each call, whether to defer."""

    declaration: ProducerDeclaration
    layer: MoELayer
    config: MoEConfig

    @torch.no_grad()
    def __call__(
        self, hidden_states: Tensor, router_logits: Tensor | PrecomputedRouting
    ) -> Tensor | UnfinalizedMoEOutput:
        """Routed output of this rank: the triple when deferring, ``[T, H]`` otherwise, neither of them reduced.

        Both leave the routed scaling factor to the finalizer unless the declaration folds it for the method.

        Raises:
            ValueError: inputs that do not fit the layer.
            UnsupportedError: more tokens than declared.
        """
        require_batch(self.layer, self.declaration, hidden_states, router_logits)
        num_tokens = hidden_states.shape[0]
        if num_tokens == 0:
            return hidden_states.new_empty(0, self.layer.hidden_size)
        pending = self._run(hidden_states, self._route(router_logits))
        return pending if self._defers(num_tokens) else finalize(pending)

    def _defers(self, num_tokens: int) -> bool:
        able = self.declaration.defers(self.layer.routing.method, self.layer.hidden_size)
        return able and self.config.should_defer(num_tokens)

    def _route(self, router_logits: Tensor | PrecomputedRouting) -> RoutedTokens:
        routing = self.layer.routing
        fp32 = "float32" in self.declaration.weights_dtypes
        return route(
            routing,
            router_logits,
            fold_scale=self.declaration.folds(routing.method),
            weights_dtype=torch.float32 if fp32 else self.layer.dtype,
        )

    def _run(self, hidden_states: Tensor, routed: RoutedTokens) -> UnfinalizedMoEOutput:
        """The triple. Where the weights went into the inputs, ones take their place (WGT-4)."""
        layer = self.layer
        local_ids = _local(routed.ids, layer)
        tokens, slots = torch.nonzero(local_ids >= 0, as_tuple=True)
        on_input = layer.routing.method.weights_input
        experts = local_ids[tokens, slots]
        if self.declaration.quantization == "nvfp4" and tokens.numel():
            rows = nvfp4_rows(hidden_states, tokens, experts, layer.experts, layer.activation)
        else:
            rows = expert_rows(
                hidden_states[tokens],
                experts,
                layer.experts,
                layer.activation,
                input_weights=routed.weights[tokens, slots] if on_input else None,
            )
        permutation = self._permute(local_ids)
        return UnfinalizedMoEOutput(
            gemm2_permuted=permutation.scatter(rows),
            expert_weights=torch.ones_like(routed.weights) if on_input else routed.weights,
            expanded_idx_to_permuted_idx=permutation.map,
            route_major=self.declaration.route_major,
        )

    def _permute(self, local_ids: Tensor) -> Permutation:
        if self.declaration.route_major:
            return route_major(local_ids)
        return expert_major(local_ids, self.layer.num_local_experts, self.declaration.tile or 1)


def _local(ids: Tensor, layer: MoELayer) -> Tensor:
    """Global expert ids as indices into this rank's experts, -1 where the expert is elsewhere.

    Only precomputed ids can be out of range; a negative one marks a slot without an expert, as in FlashInfer.
    """
    if (ids >= layer.num_experts).any():
        at = torch.nonzero(ids >= layer.num_experts)[0].tolist()
        raise ValueError(
            f"precomputed ids: expected less than num_experts {layer.num_experts}, "
            f"got {int(ids[at[0], at[1]])} at token {at[0]}, slot {at[1]}"
        )
    local = ids - layer.first_expert
    return local.masked_fill((local < 0) | (local >= layer.num_local_experts), -1)
