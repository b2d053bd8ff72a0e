"""The small case made small: one function becomes a backend.

A function cannot be asked what it supports, so its declaration is enforced for it (CAP-1, CAP-2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from moe_contract.backend import (
    Consumer,
    LoadedProducer,
    Producer,
    RankGroup,
    Tail,
    TailCapacity,
    TailOutput,
)
from moe_contract.call_checks import require_call
from moe_contract.config import MoEConfig
from moe_contract.declarations import ConsumerDeclaration, ProducerDeclaration
from moe_contract.layer import MoELayer, PrecomputedRouting
from moe_contract.limits import require_capacity, require_layer
from moe_contract.outputs import MoEOutput, UnfinalizedMoEOutput
from moe_contract.quant import QuantRecipe
from moe_contract.signatures import FINISH, FINISH_QUANTISED, PRODUCE, require_takes

TAIL_OUTPUT_FIELDS = range(2, len(fields(TailOutput)) + 1)
"""Lengths of a tuple that stands for a TailOutput: its last two fields may be left out."""


@dataclass(frozen=True)
class _FunctionProducer:
    declaration: ProducerDeclaration
    function: Callable[..., Any]

    def load(self, layer: MoELayer, config: MoEConfig) -> LoadedProducer:
        """Binds the layer; UnsupportedError where the declaration excludes it."""
        require_layer(self.declaration, layer)

        def run(hidden_states: Tensor, router_logits: Tensor | PrecomputedRouting) -> Tensor | UnfinalizedMoEOutput:
            result: Tensor | UnfinalizedMoEOutput = self.function(layer, config, hidden_states, router_logits)
            return result

        return run


@dataclass(frozen=True)
class _FunctionTail:
    declaration: ConsumerDeclaration
    function: Callable[..., Any]
    group: RankGroup
    capacity: TailCapacity
    checked: bool

    def __call__(
        self,
        output: MoEOutput,
        residual: Tensor,
        norm_weight: Tensor,
        *,
        eps: float,
        weight_bias: float = 0.0,
        quant: QuantRecipe | None = None,
    ) -> TailOutput:
        if self.checked:
            require_call(self.declaration, self.capacity, output, residual.shape[0])
        options: dict[str, Any] = {"eps": eps, "weight_bias": weight_bias}
        if quant is not None:
            options["quant"] = quant
        result: Any = self.function(self.group, output, residual, norm_weight, **options)
        # A tuple of another length is handed on as it is: whoever reads it says what is wrong with it.
        is_output = isinstance(result, tuple) and len(result) in TAIL_OUTPUT_FIELDS
        return TailOutput(*result) if is_output else result

    def close(self) -> None:
        """Nothing to release: a function keeps no workspace."""


@dataclass(frozen=True)
class _FunctionConsumer:
    declaration: ConsumerDeclaration
    function: Callable[..., Any]
    checked: bool

    def open(self, group: RankGroup, capacity: TailCapacity) -> Tail:
        """A tail around the function; UnsupportedError where the declaration excludes the capacity."""
        require_capacity(self.declaration, group, capacity)
        return _FunctionTail(self.declaration, self.function, group, capacity, self.checked)


def producer(**declared: Any) -> Callable[[Callable[..., Any]], Producer]:
    """Turns ``f(layer, config, hidden_states, router_logits)`` into a producer; keywords are its declaration.

    Raises:
        PlugInError: a word of the declaration is unknown or impossible, or the function takes other arguments.
    """
    declaration = ProducerDeclaration(**declared)

    def decorate(function: Callable[..., Any]) -> Producer:
        require_takes(function, PRODUCE)
        return _FunctionProducer(declaration, function)

    return decorate


def consumer(*, checked: bool = True, **declared: Any) -> Callable[[Callable[..., Any]], Consumer]:
    """Turns ``f(group, output, residual, norm_weight, *, eps, weight_bias)`` into a consumer.

    Keywords are its declaration. The function returns a TailOutput or its fields as a tuple. It is handed ``quant``
    only when a quantised output is asked for, so one that declares no ``quant_formats`` need not take it.

    Args:
        checked: refuse, before each call, what breaks the contract's metadata clauses or the declaration. False hands
            everything to the function, which then has to refuse it itself.
        **declared: fields of ConsumerDeclaration.

    Raises:
        PlugInError: a word of the declaration is unknown or impossible, or the function takes other arguments.
    """
    declaration = ConsumerDeclaration(**declared)

    def decorate(function: Callable[..., Any]) -> Consumer:
        require_takes(function, FINISH)
        if declaration.quant_formats:
            require_takes(function, FINISH_QUANTISED)
        return _FunctionConsumer(declaration, function, checked)

    return decorate
