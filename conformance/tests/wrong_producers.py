"""Producers that are wrong in one way each: the reference producer with its output or config changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from moe_contract import MoEConfig, MoELayer, ProducerDeclaration, RoutingMethod, UnfinalizedMoEOutput
from moe_contract.discovery import load_producer

Routed = Tensor | UnfinalizedMoEOutput
Change = Callable[[UnfinalizedMoEOutput, MoELayer], UnfinalizedMoEOutput]


@dataclass
class WrongProducer:
    """The reference producer with one change."""

    name: str
    change: Change | None = None
    config: Callable[[MoEConfig], MoEConfig] | None = None
    call: Callable[[Any, MoELayer, MoEConfig, Tensor, Any], Routed] | None = None
    declares: dict[str, Any] = field(default_factory=dict)

    @property
    def declaration(self) -> ProducerDeclaration:
        """The reference's, with this name and what else is declared."""
        return load_producer("reference").declaration.model_copy(update={"name": self.name, **self.declares})

    def load(self, layer: MoELayer, config: MoEConfig) -> Callable[..., Routed]:
        """The reference loaded with the changed config; its calls or its outputs are changed as said."""
        seen = self.config(config) if self.config else config
        loaded = load_producer("reference").load(layer, seen)

        def run(hidden_states: Tensor, router_logits: Any) -> Routed:
            if self.call is not None:
                return self.call(loaded, layer, config, hidden_states, router_logits)
            output = loaded(hidden_states, router_logits)
            return output if isinstance(output, Tensor) or self.change is None else self.change(output, layer)

        return run


def _flat(output: UnfinalizedMoEOutput, layer: MoELayer) -> UnfinalizedMoEOutput:
    return replace(output, expanded_idx_to_permuted_idx=output.expanded_idx_to_permuted_idx.reshape(-1))


def _slot_major(output: UnfinalizedMoEOutput, layer: MoELayer) -> UnfinalizedMoEOutput:
    return replace(output, expanded_idx_to_permuted_idx=output.expanded_idx_to_permuted_idx.T.contiguous())


def _other_dtype(output: UnfinalizedMoEOutput, layer: MoELayer) -> UnfinalizedMoEOutput:
    return replace(output, expert_weights=output.expert_weights.float())


def _mislabelled(output: UnfinalizedMoEOutput, layer: MoELayer) -> UnfinalizedMoEOutput:
    other = torch.float16 if output.expert_weights.dtype == torch.bfloat16 else torch.bfloat16
    return replace(output, expert_weights=output.expert_weights.to(other).view(output.expert_weights.dtype))


def _weighted(output: UnfinalizedMoEOutput, layer: MoELayer) -> UnfinalizedMoEOutput:
    index = output.expanded_idx_to_permuted_idx
    factor = torch.ones(output.gemm2_permuted.shape[0], dtype=output.gemm2_permuted.dtype)
    factor[index[index >= 0].long()] = output.expert_weights[index >= 0]
    return replace(output, gemm2_permuted=output.gemm2_permuted * factor.unsqueeze(1))


def _scaled(output: UnfinalizedMoEOutput, layer: MoELayer) -> UnfinalizedMoEOutput:
    return replace(output, expert_weights=output.expert_weights * layer.routing.routed_scaling_factor)


def _duplicate(output: UnfinalizedMoEOutput, layer: MoELayer) -> UnfinalizedMoEOutput:
    index = output.expanded_idx_to_permuted_idx.clone()
    flat = index.view(-1)
    valid = (flat >= 0).nonzero().reshape(-1)
    if valid.numel() > 1:
        flat[valid[1]] = flat[valid[0]]
    return replace(output, expanded_idx_to_permuted_idx=index)


def _past_the_end(output: UnfinalizedMoEOutput, layer: MoELayer) -> UnfinalizedMoEOutput:
    index = output.expanded_idx_to_permuted_idx.clone()
    index.view(-1)[-1] = output.gemm2_permuted.shape[0]
    return replace(output, expanded_idx_to_permuted_idx=index)


def _padded(output: UnfinalizedMoEOutput, layer: MoELayer) -> UnfinalizedMoEOutput:
    return replace(output, gemm2_permuted=torch.nn.functional.pad(output.gemm2_permuted, (0, 64)))


def _triple_of_nothing(loaded: Any, layer: MoELayer, config: MoEConfig, hidden: Tensor, logits: Any) -> Routed:
    if hidden.shape[0] or not config.use_deferred_moe_finalize:
        return loaded(hidden, logits)  # type: ignore[no-any-return]  # the reference producer
    top_k = layer.routing.top_k
    return UnfinalizedMoEOutput(hidden, hidden.new_zeros(0, top_k), torch.zeros(0, top_k, dtype=torch.int32))


def _overwrites(loaded: Any, layer: MoELayer, config: MoEConfig, hidden: Tensor, logits: Any) -> Routed:
    output: Routed = loaded(hidden, logits)
    hidden.data.mul_(2)
    return output


def _zeros(loaded: Any, layer: MoELayer, config: MoEConfig, hidden: Tensor, logits: Any) -> Routed:
    return torch.zeros_like(hidden)


def _zeros_on_one_rank(loaded: Any, layer: MoELayer, config: MoEConfig, hidden: Tensor, logits: Any) -> Routed:
    output: Routed = loaded(hidden, logits)
    return torch.zeros_like(hidden) if config.tp_size == 1 else output


def _input_unweighted(loaded: Any, layer: MoELayer, config: MoEConfig, hidden: Tensor, logits: Any) -> Routed:
    """The weight on the expert's output, as every other method has it; never deferred all the same."""
    if layer.routing.method is not RoutingMethod.LLAMA4:
        return loaded(hidden, logits)  # type: ignore[no-any-return]  # the reference producer
    other = replace(layer, routing=replace(layer.routing, method=RoutingMethod.SIGMOID))
    return load_producer("reference").load(other, MoEConfig())(hidden, logits)


def _cap_ignored(config: MoEConfig) -> MoEConfig:
    return _Live(config, "max_deferred_tokens", None)


def _always(config: MoEConfig) -> MoEConfig:
    return _Live(config, "tp_size", 2)


class _Live(MoEConfig):
    """The engine's config as it is at each call, with one field that is always ``value``."""

    def __init__(self, config: MoEConfig, field: str, value: Any) -> None:
        super().__init__(**config.model_dump())
        object.__setattr__(self, "_source", (config, field, value))

    def should_defer(self, num_tokens: int) -> bool:
        """As the engine's config says now, but for the one field."""
        config, field, value = self._source  # type: ignore[attr-defined]  # set in __init__
        return MoEConfig.should_defer(config.model_copy(update={field: value}), num_tokens)


class _Borrowed:
    """One buffer a shape, written again at each call."""

    def __init__(self) -> None:
        self.buffers: dict[torch.Size, Tensor] = {}

    def __call__(self, output: UnfinalizedMoEOutput, layer: MoELayer) -> UnfinalizedMoEOutput:
        rows = output.gemm2_permuted
        buffer = self.buffers.setdefault(rows.shape, torch.empty_like(rows))
        return replace(output, gemm2_permuted=buffer.copy_(rows))


class BorrowingProducer(WrongProducer):
    """Every loaded producer has its own buffers."""

    def load(self, layer: MoELayer, config: MoEConfig) -> Callable[..., Routed]:
        """The reference, whose rows lie in one buffer a shape."""
        return WrongProducer(self.name, change=_Borrowed()).load(layer, config)


WRONG_PRODUCERS: dict[str, tuple[WrongProducer, str]] = {
    producer.name: (producer, clause)
    for producer, clause in (
        (WrongProducer("flat-map", change=_flat), "MAP-1"),
        (WrongProducer("slot-major-map", change=_slot_major), "MAP-1"),
        (WrongProducer("weights-of-another-dtype", change=_other_dtype), "WGT-2"),
        (WrongProducer("mislabelled-weights", change=_mislabelled), "WGT-3"),
        (WrongProducer("weighted-rows", change=_weighted), "ROWS-3"),
        (WrongProducer("scale-folded-undeclared", change=_scaled), "SCALE-3"),
        (WrongProducer("two-routes-one-row", change=_duplicate), "MAP-3"),
        (WrongProducer("entry-past-the-end", change=_past_the_end), "MAP-2"),
        (WrongProducer("padded-rows", change=_padded), "ROWS-4"),
        (WrongProducer("triple-of-no-tokens", call=_triple_of_nothing), "OUT-2"),
        (WrongProducer("defers-without-reduction", config=_always), "DEFER-1"),
        (WrongProducer("cap-ignored", config=_cap_ignored), "DEFER-1"),
        (WrongProducer("frozen-flag", config=lambda config: config.model_copy()), "DEFER-2"),
        (WrongProducer("hidden-states-overwritten", call=_overwrites), "OUT-4"),
        (WrongProducer("finalizes-zeros", call=_zeros, declares={"can_defer": False}), "OUT-1"),
        (WrongProducer("zeros-on-one-rank", call=_zeros_on_one_rank), "OUT-1"),
        (WrongProducer("llama4-input-unweighted", call=_input_unweighted), "OUT-1"),
        (BorrowingProducer("buffer-reused"), "OUT-5"),
    )
}
"""Each with the clause that it breaks."""
