"""A correct producer with one delta: in its result, in its call, or in the layer or config that it is loaded with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from moe_conformance.faults.bases import base_producer
from moe_conformance.faults.model import Fault, Planted, Variant, family_of, name_of, sentence_of
from moe_contract import MoEConfig, MoELayer, ProducerDeclaration

Where = Literal["deferred", "finalized", "any", "call", "layer", "config", "load"]
"""What the delta is handed and changes: the unfinalized output, the finalized one, either; the whole call; the layer or
the config before it is loaded; or everything: the delta is the whole of ``load``."""
Delta = Callable[..., Any]


@dataclass
class Call:
    """One call of a loaded producer, as a delta sees it."""

    loaded: Any
    """The correct producer, loaded."""
    layer: MoELayer
    config: MoEConfig
    hidden_states: Tensor
    router_logits: Any
    number: int
    """Calls of this loaded producer so far, this one included."""
    kept: dict[str, Any]
    """What a wrong producer keeps from call to call."""

    def right(self) -> Any:
        """What the correct producer returns."""
        return self.loaded(self.hidden_states, self.router_logits)


@dataclass
class DeltaProducer:
    """The producer ``base`` with a delta. ``declares`` replaces fields of its declaration."""

    name: str
    delta: Delta
    where: Where
    base: str = "reference"
    declares: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def declaration(self) -> ProducerDeclaration:
        """The base's, under this name."""
        return base_producer(self.base).declaration.model_copy(update={"name": self.name, **self.declares})

    def load(self, layer: MoELayer, config: MoEConfig) -> Callable[..., Any]:
        """The base's, behind the delta."""
        if self.where == "load":
            return self.delta(layer, config)  # type: ignore[no-any-return]  # what the fault loads
        given = self.delta(layer) if self.where == "layer" else layer
        seen = self.delta(config) if self.where == "config" else config
        loaded, kept = base_producer(self.base).load(given, seen), {"calls": 0}

        def run(hidden_states: Tensor, router_logits: Any) -> Any:
            kept["calls"] += 1
            call = Call(loaded, layer, config, hidden_states, router_logits, kept["calls"], kept)
            if self.where == "call":
                return self.delta(call)
            output = call.right()
            wanted = {"deferred": not isinstance(output, Tensor), "finalized": isinstance(output, Tensor), "any": True}
            return self.delta(output, call) if wanted.get(self.where, False) else output

        return run


def producer_fault(
    clause: str,
    where: Where = "deferred",
    *,
    into: list[Fault],
    smallest: str = "",
    bugs: tuple[str, ...] = (),
    base: str = "reference",
    **declares: Any,
) -> Callable[[Delta], Delta]:
    """Registers a delta; its name is the fault's id, its docstring the sentence, keywords its declaration."""

    def register(delta: Delta) -> Delta:
        name = name_of(delta)
        planted = Planted(producer=DeltaProducer(name, delta, where, base, declares))
        into.append(
            Fault(name, clause, sentence_of(delta), "producer", family_of(delta), lambda: planted, smallest, bugs)
        )
        return delta

    return register


def right_producer(
    where: Where = "deferred", *, into: list[Variant], base: str = "reference", **declares: Any
) -> Callable[[Delta], Delta]:
    """Registers a delta that leaves the producer right."""

    def register(delta: Delta) -> Delta:
        name = name_of(delta)
        planted = Planted(producer=DeltaProducer(name, delta, where, base, declares))
        into.append(Variant(name, sentence_of(delta), family_of(delta), lambda: planted))
        return delta

    return register
