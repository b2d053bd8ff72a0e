"""A plug-in's methods, held to the protocol before each is called: a wrong signature is no refusal and no clause's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.cases.tail_data import TailInputs
from moe_conformance.verdicts import BackendError
from moe_contract import (
    Consumer,
    ConsumerDeclaration,
    LoadedProducer,
    MoEConfig,
    MoELayer,
    PlugInError,
    PrecomputedRouting,
    Producer,
    ProducerDeclaration,
    RankGroup,
    Tail,
    TailCapacity,
    TailOutput,
    UnfinalizedMoEOutput,
)
from moe_contract.checks.findings import TRIPLE
from moe_contract.places import place_of_callable
from moe_contract.signatures import CLOSE, LOAD, OPEN, RUN, TAIL, Arguments, require_takes


@dataclass(frozen=True)
class CheckedConsumer:
    """A consumer whose ``open``, and the tail that it returns, take the calls of the protocol.

    The tail is checked once and handed on as it is, so that a captured or compiled call contains nothing of ours.
    """

    name: str
    consumer: Consumer

    @property
    def declaration(self) -> ConsumerDeclaration:
        """What the consumer says of itself."""
        return self.consumer.declaration

    def open(self, group: RankGroup, capacity: TailCapacity) -> Tail:
        """The consumer's tail; raises BackendError where it is none."""
        _require(self.name, "open", self.consumer.open, OPEN)
        tail = self.consumer.open(group, capacity)
        origin = place_of_callable(self.consumer.open)
        _require(self.name, "the tail that open returned", tail, TAIL, origin)
        if not hasattr(tail, "close"):
            raise BackendError(f"{self.name}: the tail that open returned has no close() ({origin})")
        _require(self.name, "close of the tail that open returned", tail.close, CLOSE, origin)
        return tail


@dataclass(frozen=True)
class CheckedProducer:
    """A producer whose ``load``, and what it returns, take the calls of the protocol."""

    name: str
    producer: Producer

    @property
    def declaration(self) -> ProducerDeclaration:
        """What the producer says of itself."""
        return self.producer.declaration

    def load(self, layer: MoELayer, config: MoEConfig) -> LoadedProducer:
        """The producer with its weights prepared; raises BackendError where it cannot be called."""
        _require(self.name, "load", self.producer.load, LOAD)
        loaded = self.producer.load(layer, config)
        _require(self.name, "what load returned", loaded, RUN, place_of_callable(self.producer.load))

        def run(hidden_states: Tensor, router_logits: Tensor | PrecomputedRouting) -> Tensor | UnfinalizedMoEOutput:
            output = loaded(hidden_states, router_logits)
            for field in ("routed",) if isinstance(output, Tensor) else TRIPLE:
                tensor = output if field == "routed" else getattr(output, field, None)
                require_data(self.name, field, tensor, meta=hidden_states.is_meta)
            return output

        return run


def require_data(name: str, field: str, tensor: object, *, meta: bool = False) -> None:
    """Raises BackendError for a tensor that cannot be read element by element; takes anything else.

    Args:
        name: the backend.
        field: what the tensor was returned as.
        tensor: what was returned.
        meta: the call was made on torch's meta device, where no tensor has data.
    """
    if not isinstance(tensor, Tensor):
        return
    if tensor.layout is not torch.strided:
        kind = str(tensor.layout).removeprefix("torch.")
        raise BackendError(f"{name} returned {field} as a {kind} tensor, expected a strided one")
    if tensor.is_meta and not meta:
        raise BackendError(f"{name} returned {field} on the meta device, without data, expected a real tensor")


def checked_output(name: str, output: object, call: TailInputs) -> TailOutput:
    """A tail's output on the CPU; raises BackendError where it is not what a tail returns for this call."""
    if not isinstance(output, TailOutput):
        got = f"a tuple of {len(output)}" if isinstance(output, tuple) else type(output).__name__
        fields = "; @consumer takes its first two fields as a tuple too" if isinstance(output, tuple) else ""
        raise BackendError(f"{name} returned {got}, expected moe_contract.TailOutput{fields}")
    want = (tuple(call.residual.shape), call.residual.dtype)
    for what in ("residual_out", "norm_out"):
        tensor = getattr(output, what)
        if not isinstance(tensor, Tensor):
            raise BackendError(f"{name} returned {type(tensor).__name__} as {what}, expected a tensor {list(want[0])}")
        require_data(name, what, tensor)
        if (tuple(tensor.shape), tensor.dtype) != want:
            raise BackendError(
                f"{name} returned {what} {list(tensor.shape)} {tensor.dtype}, expected {list(want[0])} {want[1]}"
            )
    quantised = [_optional(name, what, getattr(output, what)) for what in ("quant_out", "quant_scale")]
    return TailOutput(output.residual_out.cpu(), output.norm_out.cpu(), *quantised)


def _optional(name: str, what: str, value: object) -> Tensor | None:
    """The tensor on the CPU, or None where there is none."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise BackendError(f"{name} returned {type(value).__name__} as {what}, expected a tensor or None")
    require_data(name, what, value)
    return value.cpu()


def _require(name: str, what: str, function: object, call: Arguments, origin: str = "") -> None:
    """Raises BackendError. ``origin``: the plug-in's line to name where ``function`` has none of its own."""
    if not callable(function):
        place = f" ({origin})" if origin else ""
        got = "None" if function is None else f"a {type(function).__name__}"
        raise BackendError(f"{name}: {what} is {got}{place}; expected a callable that takes {call}")
    try:
        require_takes(function, call, what)
    except PlugInError as error:
        raise BackendError(f"{name}: {error}") from None
