"""A producer with one case: run it on every rank's part of a layer, judge what each rank hands over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from moe_conformance.cases.case import LayerCase
from moe_conformance.cases.latest import Latest
from moe_conformance.cases.layer_data import LayerInputs, make_layer_inputs, make_parts
from moe_conformance.declared_support import layer_unshardable, layer_unsupported
from moe_conformance.harness.threads import ThreadRankGroup
from moe_conformance.subjects.calls import Settings, on_every_rank
from moe_conformance.truth.layer_oracle import RankRows, RankTruth, rank_rows, rank_truth
from moe_conformance.verdicts import ClauseBrokenError, UnsupportedCaseError
from moe_contract import (
    ExpertWeights,
    MoEConfig,
    MoELayer,
    PrecomputedRouting,
    Producer,
    ProducerDeclaration,
    UnfinalizedMoEOutput,
)
from moe_contract.checks import Expectation, Tier, check
from moe_contract.declarations import Quantization
from moe_contract.dtypes import DtypeName
from moe_contract.forward import MoEForward
from moe_contract.outputs import MoEOutput

RoutedOutput = Tensor | UnfinalizedMoEOutput
_LATEST_INPUTS: Latest[LayerCase, LayerInputs] = Latest()


def cached_inputs(case: LayerCase) -> LayerInputs:
    """The inputs of a case, kept until another case's are asked for."""
    return _LATEST_INPUTS.get(case, lambda: make_layer_inputs(case))


@lru_cache(maxsize=16)
def _cached_rows(case: LayerCase, rank: int, intermediate_dtype: DtypeName, quantization: Quantization) -> RankRows:
    """Producers of the same arithmetic are judged by the same rows, one after the other; 16 are the ranks of the
    largest case."""
    return rank_rows(cached_inputs(case), make_parts(case)[rank], intermediate_dtype, quantization)


@dataclass
class LayerSubject:
    """What a producer test is handed. Public methods raise the exceptions of verdicts.py."""

    name: str
    producer: Producer
    case: LayerCase
    clause: str
    settings: Settings = field(default_factory=Settings)
    headroom: float | None = None

    @property
    def declaration(self) -> ProducerDeclaration:
        """What the producer says of itself."""
        return self.producer.declaration

    @property
    def inputs(self) -> LayerInputs:
        """The whole layer and the batch, on the CPU. Read-only: calls get copies of the batch."""
        return cached_inputs(self.case)

    @property
    def parts(self) -> list[MoELayer]:
        """Each rank's part of the layer."""
        self._require_shardable()
        return make_parts(self.case)

    @property
    def defers(self) -> bool:
        """Whether the declaration says that this case's method can be handed over unfinalized."""
        return self.declaration.defers(self.case.method, self.case.hidden_size)

    def config(self, *, defer: bool = True, cap: int | None = None) -> MoEConfig:
        """The config that opts in to deferral over the case's ranks."""
        self._require_shardable()
        return MoEConfig(
            defer_moe_finalize=defer, tp_size=self.case.ranks, ep_size=self.case.ep, max_deferred_tokens=cap
        )

    def require_support(self, *, deferral: bool = False) -> None:
        """Raises UnsupportedCaseError where the declaration does not cover the case (or deferral of it)."""
        self._require_shardable()
        reason = layer_unsupported(self.declaration, self.case, self.settings.device)
        if reason is None and deferral and not self.defers:
            what = f"{self.case.method.value} routing at hidden size {self.case.hidden_size}"
            reason = f"{self.name} declares that it never defers {what}"
        if reason is not None:
            raise UnsupportedCaseError(reason)

    def _require_shardable(self) -> None:
        reason = layer_unshardable(self.case)
        if reason is not None:
            raise UnsupportedCaseError(reason)

    def run(self, config: MoEConfig | None = None) -> list[RoutedOutput]:
        """One call on every rank; what each returned, untouched."""
        self.require_support()
        return self.run_unchecked(config)

    def run_unchecked(self, config: MoEConfig | None = None) -> list[RoutedOutput]:
        """One call on every rank, whether or not the declaration covers the case."""
        config = config or self.config()
        parts, inputs = self.parts, self.inputs

        def one_rank(group: ThreadRankGroup) -> RoutedOutput:
            loaded = self.producer.load(on_device(parts[group.rank], self.settings.device), config)
            return loaded(*self.batch(inputs))

        return on_every_rank(self.name, self.settings, self.case.ranks, one_rank)

    def run_forward(self, config: MoEConfig, *, reduce_results: bool = False) -> list[MoEOutput | Tensor]:
        """The layer's forward pass around the producer on every rank, shared expert and remaining scale included."""
        self.require_support()
        self.prepare()

        def one_rank(group: ThreadRankGroup) -> MoEOutput | Tensor:
            return self.forward(group, config, reduce_results=reduce_results)

        return on_every_rank(self.name, self.settings, self.case.ranks, one_rank)

    def prepare(self) -> None:
        """Makes inputs and parts, once, before several ranks' threads ask for them."""
        _ = self.inputs, self.parts

    def forward(self, group: ThreadRankGroup, config: MoEConfig, *, reduce_results: bool) -> MoEOutput | Tensor:
        """One rank's forward pass, on that rank's thread."""
        part = on_device(self.parts[group.rank], self.settings.device)
        forward = MoEForward(self.producer, part, config, group, reduce_results=reduce_results)
        return forward(*self.batch(self.inputs))

    def batch(self, inputs: LayerInputs) -> tuple[Tensor, Tensor | PrecomputedRouting]:
        """A copy of the hidden states and logits on the device."""
        device = torch.device(self.settings.device)
        routing = inputs.router_logits
        if isinstance(routing, PrecomputedRouting):
            copy: Tensor | PrecomputedRouting = PrecomputedRouting(
                routing.ids.clone().to(device), routing.weights.clone().to(device)
            )
        else:
            copy = routing.clone().to(device)
        return inputs.hidden_states.clone().to(device), copy

    def expectation(self, rank: int, config: MoEConfig, num_tokens: int | None = None) -> Expectation:
        """What the checks are told about this call."""
        tokens = self.case.tokens if num_tokens is None else num_tokens
        expected = Expectation.of_call(self.declaration, self.parts[rank], config, tokens, rank)
        return replace(expected, device=None)

    def require_contract(self, outputs: Sequence[object], config: MoEConfig | None = None) -> None:
        """The tiers of the contract's own checks over every rank's output."""
        config = config or self.config()
        for rank, output in enumerate(outputs):
            violations = check(output, self.expectation(rank, config))
            if violations:
                raise ClauseBrokenError(violations)

    def require_form(self, outputs: Sequence[object], config: MoEConfig, *, tier: Tier = "metadata") -> None:
        """The checks up to ``tier``, whether deferred or not: without them an output cannot be worked with."""
        for rank, output in enumerate(outputs):
            violations = check(output, replace(self.expectation(rank, config), deferred=None), tier=tier)
            if violations:
                raise ClauseBrokenError(violations)

    def truth(self, rank: int) -> RankTruth:
        """The float64 truth of one rank."""
        expected = self.expectation(rank, self.config())
        declared = self.declaration
        rows = _cached_rows(self.case, rank, declared.intermediate_dtype, declared.quantization)
        return rank_truth(self.inputs, rows, self.declaration, expected.weights_dtype)

    def record(self, headroom: float) -> None:
        """Keeps the largest error / bound for the report."""
        self.headroom = max(self.headroom or 0.0, headroom)


Batch = tuple[Tensor, Tensor | PrecomputedRouting]


def of_tokens(batch: Batch, tokens: Tensor) -> Batch:
    """The batch of these tokens, in this order: ``tokens`` are int64 indices on the CPU."""
    hidden, routing = batch
    chosen = tokens.to(hidden.device)
    if isinstance(routing, PrecomputedRouting):
        return hidden[chosen], PrecomputedRouting(routing.ids[chosen], routing.weights[chosen])
    return hidden[chosen], routing[chosen]


def on_device(part: MoELayer, device: str) -> MoELayer:
    """A rank's part on ``device``."""
    if device == "cpu":
        return part

    def move(weights: ExpertWeights) -> ExpertWeights:
        moved = {name: tensor.to(device) for name, tensor in vars(weights).items() if tensor is not None}
        return replace(weights, **moved)

    shared = None if part.shared is None else move(part.shared)
    bias = part.routing.bias
    routing = replace(part.routing, bias=None if bias is None else bias.to(device))
    return replace(part, experts=move(part.experts), shared=shared, routing=routing)
