"""Errors planted in the TRTLLM adapters: what an integration gets wrong, each at the place where it would be made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_backends.common.nvfp4 import unswizzle_scales
from moe_backends.trtllm import Emulator, Version
from moe_backends.trtllm.calls import Bf16Format, Format, Nvfp4Format
from moe_backends.trtllm.declare import declare_bf16, declare_nvfp4
from moe_backends.trtllm.producer import TrtllmProducer
from moe_backends.trtllm.returns import Entry
from moe_backends.trtllm.versions import EMULATED
from moe_contract import ExpertWeights, MoEConfig, MoELayer, ProducerDeclaration, RoutingMethod, UnfinalizedMoEOutput

Arguments = dict[str, Any]


class ChangedEngine(Emulator):
    """The emulator behind a call that is wrong, or with a result that is."""

    def __init__(
        self,
        version: Version = EMULATED,
        *,
        arguments: Callable[[Arguments], Arguments] | None = None,
        result: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(version)
        self.arguments, self.result = arguments, result

    def call(self, entry: Entry, arguments: Mapping[str, object]) -> object:
        given = dict(arguments) if self.arguments is None else self.arguments(dict(arguments))
        result = super().call(entry, given)
        return result if self.result is None else self.result(result)


@dataclass(frozen=True)
class ChangedFormat:
    """A weight format whose canonical weights or prepared keywords are changed."""

    base: Format
    weights: Callable[[ExpertWeights], ExpertWeights] = lambda weights: weights
    prepared: Callable[[Arguments], Arguments] = lambda prepared: prepared

    def prepare(self, weights: ExpertWeights) -> Arguments:
        return self.prepared(dict(self.base.prepare(self.weights(weights))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base, name)


@dataclass(frozen=True)
class ChangedOutput:
    """A producer around the adapter whose output is changed, or that answers itself."""

    base: TrtllmProducer
    change: Callable[[Any, Tensor, MoELayer, MoEConfig], Any]

    @property
    def declaration(self) -> ProducerDeclaration:
        return self.base.declaration

    def load(self, layer: MoELayer, config: MoEConfig) -> Callable[..., Any]:
        loaded = self.base.load(layer, config)

        def run(hidden_states: Tensor, router_logits: Any) -> Any:
            return self.change(loaded(hidden_states, router_logits), hidden_states, layer, config)

        return run


def bf16(engine: Emulator | None = None, weight_format: Format | None = None, **declares: Any) -> TrtllmProducer:
    """The emulated bfloat16 producer with parts exchanged."""
    engine = engine or Emulator()
    declaration = declare_bf16(engine.version, emulated=True).model_copy(update=declares)
    return TrtllmProducer(declaration, engine, weight_format or Bf16Format())


def nvfp4(weight_format: Format | None = None) -> TrtllmProducer:
    """The emulated NVFP4 producer with another weight format."""
    return TrtllmProducer(declare_nvfp4(EMULATED, emulated=True), Emulator(), weight_format or Nvfp4Format())


def _label_float32(output: Any, hidden: Tensor, layer: MoELayer, config: MoEConfig) -> Any:
    """The buffer of a version in the window, handed on as it is labelled."""
    if isinstance(output, Tensor):
        return output
    buffer = torch.zeros(output.expert_weights.shape)
    buffer.view(torch.bfloat16).view(-1)[: buffer.numel()] = output.expert_weights.flatten()
    return replace(output, expert_weights=buffer)


def _flat(output: Any, hidden: Tensor, layer: MoELayer, config: MoEConfig) -> Any:
    if isinstance(output, Tensor):
        return output
    return replace(output, expanded_idx_to_permuted_idx=output.expanded_idx_to_permuted_idx.view(-1))


def _one_slot_more(output: Any, hidden: Tensor, layer: MoELayer, config: MoEConfig) -> Any:
    """A fused shared expert's slot in the map, reshaped to whatever width it has; the weights were cut to K."""
    if isinstance(output, Tensor):
        return output
    index = output.expanded_idx_to_permuted_idx
    shared = torch.full((len(index), 1), -1, dtype=torch.int32)
    return replace(output, expanded_idx_to_permuted_idx=torch.cat([index, shared], 1))


def _triple_of_nothing(output: Any, hidden: Tensor, layer: MoELayer, config: MoEConfig) -> Any:
    if len(hidden) or not config.use_deferred_moe_finalize:
        return output
    slots = layer.routing.top_k
    empty = torch.zeros(0, slots, dtype=torch.int32)
    return UnfinalizedMoEOutput(hidden, hidden.new_zeros(0, slots), empty)


def _as_list(output: Any, hidden: Tensor, layer: MoELayer, config: MoEConfig) -> Any:
    return [output] if isinstance(output, Tensor) and len(output) else output


def _without(name: str, value: object) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {**arguments, name: value} if name in arguments else arguments


def _swapped(weights: ExpertWeights) -> ExpertWeights:
    return weights if weights.gate is None else replace(weights, up=weights.gate, gate=weights.up)


def _unshuffled(prepared: Arguments) -> Arguments:
    """Rows of down as they come, only blocked."""
    from moe_backends.trtllm.weights.bf16 import restore_second
    from moe_backends.trtllm.weights.blocks import to_blocks

    return {**prepared, "gemm2_weights": to_blocks(restore_second(prepared["gemm2_weights"]).contiguous())}


def _linear_scales(prepared: Arguments) -> Arguments:
    """Block scales row by row instead of in tiles of 128 x 4."""
    scales = prepared["gemm1_weights_scale"]
    experts, rows, columns = scales.shape
    linear = unswizzle_scales(scales.view(torch.uint8).view(experts * rows, columns), experts * rows, columns * 16)
    return {**prepared, "gemm1_weights_scale": linear.view(scales.shape).view(torch.float8_e4m3fn)}


def _inverted_scale(prepared: Arguments) -> Arguments:
    return {**prepared, "output2_scale_scalar": 1.0 / prepared["output2_scale_scalar"]}


def _folds(*methods: RoutingMethod) -> frozenset[RoutingMethod]:
    return frozenset(methods)


WRONG_TRTLLM: dict[str, tuple[Any, str]] = {
    "weights-labelled-float32": (ChangedOutput(bf16(), _label_float32), "WGT-2"),
    "flat-map": (ChangedOutput(bf16(), _flat), "MAP-1"),
    "map-of-one-slot-more": (ChangedOutput(bf16(), _one_slot_more), "MAP-1"),
    "scale-folded-twice": (bf16(folds_scale=_folds()), "SCALE-3"),
    "scale-never-folded": (bf16(Emulator(Version(0, 6, 12)), folds_scale=_folds(RoutingMethod.MINIMAX2)), "SCALE-3"),
    "expert-offset-dropped": (bf16(ChangedEngine(arguments=_without("local_expert_offset", 0))), "MAP-5"),
    "gate-and-up-swapped": (bf16(weight_format=ChangedFormat(Bf16Format(), weights=_swapped)), "NUM-1"),
    "shuffle-left-out": (bf16(weight_format=ChangedFormat(Bf16Format(), prepared=_unshuffled)), "NUM-1"),
    "linear-block-scales": (nvfp4(ChangedFormat(Nvfp4Format(), prepared=_linear_scales)), "NUM-1"),
    "global-scale-inverted": (nvfp4(ChangedFormat(Nvfp4Format(), prepared=_inverted_scale)), "NUM-1"),
    "list-returned-as-it-is": (ChangedOutput(bf16(), _as_list), "OUT-1"),
    "triple-of-no-tokens": (ChangedOutput(bf16(), _triple_of_nothing), "OUT-2"),
}
"""Each with the clause that it breaks."""
