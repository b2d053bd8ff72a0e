"""Plug-ins that do not keep the protocol at all: wrong signatures, and results that are not even of the right type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from moe_contract import ConsumerDeclaration, ProducerDeclaration, TailOutput, UnfinalizedMoEOutput
from moe_contract.discovery import load_consumer, load_producer

Change = Callable[[Any], Any]


class Consumer:
    """A right consumer, of which one thing is changed."""

    declaration = ConsumerDeclaration(name="shaped", weights_dtypes={"activation", "float32"}, route_major=True)

    def __init__(self, change: Change) -> None:
        self.change = change
        self.inner = load_consumer("reference")

    def open(self, group: Any, capacity: Any) -> Any:
        """The reference's tail, whose result is changed."""
        return ChangedTail(self.inner.open(group, capacity), self.change)


class ChangedTail:
    """A tail whose result is changed."""

    def __init__(self, tail: Any, change: Change) -> None:
        self.tail, self.change = tail, change

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """The changed result."""
        return self.change(self.tail(*arguments, **options))

    def close(self) -> None:
        """Closes the reference's."""
        self.tail.close()


class Producer:
    """A right producer, whose result is changed."""

    declaration = ProducerDeclaration(name="shaped")

    def __init__(self, change: Change) -> None:
        self.change = change
        self.inner = load_producer("reference")

    def load(self, layer: Any, config: Any) -> Any:
        """The reference's call, whose result is changed."""
        run = self.inner.load(layer, config)
        return lambda hidden_states, router_logits: self.change(run(hidden_states, router_logits))


class OpenTakesOne(Consumer):
    """Its open forgets the capacity."""

    def open(self, group: Any) -> Any:  # type: ignore[override]
        """Never reached."""


class OpenGivesNothing(Consumer):
    """It has no tail."""

    def open(self, group: Any, capacity: Any) -> Any:
        """Nothing."""


class OpenGivesFunction(Consumer):
    """Its tail has no close."""

    def open(self, group: Any, capacity: Any) -> Any:
        """The call alone."""
        tail = self.inner.open(group, capacity)
        return lambda *arguments, **options: tail(*arguments, **options)


class CallTakesTwo(Consumer):
    """Its tail takes two arguments."""

    def open(self, group: Any, capacity: Any) -> Any:
        """Such a tail."""

        class Two(ChangedTail):
            def __call__(self, output: Any, residual: Any) -> Any:  # type: ignore[override]
                """Never reached."""

        return Two(self.inner.open(group, capacity), self.change)


class CallWithoutQuant(Consumer):
    """Its tail has not heard of ``quant``."""

    def open(self, group: Any, capacity: Any) -> Any:
        """Such a tail."""

        class Old(ChangedTail):
            def __call__(self, output: Any, residual: Any, norm_weight: Any, *, eps: Any, weight_bias: Any = 0) -> Any:  # type: ignore[override]
                """Never reached."""

        return Old(self.inner.open(group, capacity), self.change)


class Raises(Consumer):
    """It fails when it is opened."""

    def open(self, group: Any, capacity: Any) -> Any:
        """No tail."""
        raise KeyError("no workspace")


class CloseRaises(Consumer):
    """It fails when it is closed."""

    def open(self, group: Any, capacity: Any) -> Any:
        """Such a tail."""

        class Stuck(ChangedTail):
            def close(self) -> None:
                """Fails."""
                raise KeyError("no buffer to free")

        return Stuck(self.inner.open(group, capacity), self.change)


class LoadTakesOne(Producer):
    """Its load forgets the config."""

    def load(self, layer: Any) -> Any:  # type: ignore[override]
        """Never reached."""


class LoadGivesNothing(Producer):
    """Nothing is loaded."""

    def load(self, layer: Any, config: Any) -> Any:
        """Nothing."""


class RunTakesOne(Producer):
    """Its call forgets the logits."""

    def load(self, layer: Any, config: Any) -> Any:
        """Such a call."""
        return lambda hidden_states: hidden_states


class LoadRaises(Producer):
    """It fails when it is loaded."""

    def load(self, layer: Any, config: Any) -> Any:
        """Nothing."""
        raise KeyError("no weights")


SIGNATURES = {
    "open-takes-one": OpenTakesOne, "open-gives-nothing": OpenGivesNothing, "open-gives-function": OpenGivesFunction,
    "call-takes-two": CallTakesTwo, "call-without-quant": CallWithoutQuant, "load-takes-one": LoadTakesOne,
    "load-gives-nothing": LoadGivesNothing, "run-takes-one": RunTakesOne,
}  # fmt: skip
"""Plug-ins that cannot be called as the protocol calls them."""
RAISING = {"open-raises": Raises, "close-raises": CloseRaises, "load-raises": LoadRaises}
TAIL_RESULTS: dict[str, Change] = {
    "nothing": lambda output: None,
    "text": lambda output: "done",
    "tensor": lambda output: output.residual_out,
    "tuple": lambda output: (output.residual_out, output.norm_out),
    "no-norm": lambda output: replace(output, norm_out=None),
    "list": lambda output: replace(output, residual_out=output.residual_out.tolist()),
    "flat": lambda output: replace(output, residual_out=output.residual_out.reshape(-1)),
    "wide": lambda output: replace(output, residual_out=output.residual_out.double()),
    "quantised": lambda output: TailOutput(output.residual_out, output.norm_out, 5, "scale"),  # type: ignore[arg-type]
    "elsewhere": lambda output: replace(output, residual_out=output.residual_out.to("meta")),
    "sparse": lambda output: replace(output, residual_out=output.residual_out.to_sparse()),
}
"""Results that no tail may return."""


def _each(**changes: Change) -> Change:
    """Changes an unfinalized output's fields and leaves tensors as they are."""

    def change(output: Any) -> Any:
        if not isinstance(output, UnfinalizedMoEOutput):
            return output
        return replace(output, **{name: made(getattr(output, name)) for name, made in changes.items()})

    return change


LAYER_RESULTS: dict[str, Change] = {
    "nothing": lambda output: None,
    "text": lambda output: "done",
    "tuple": lambda output: tuple(vars(output).values()) if isinstance(output, UnfinalizedMoEOutput) else (output,),
    "dict": lambda output: dict(vars(output)) if isinstance(output, UnfinalizedMoEOutput) else {},
    "object": lambda output: object(),
    "flat": lambda output: output.reshape(-1) if isinstance(output, torch.Tensor) else output,
    "wide": lambda output: output.double() if isinstance(output, torch.Tensor) else output,
    "no-rows": _each(gemm2_permuted=lambda rows: None),
    "listed-weights": _each(expert_weights=lambda weights: weights.tolist()),
    "no-map": _each(expanded_idx_to_permuted_idx=lambda index: None),
    "flat-rows": _each(gemm2_permuted=lambda rows: rows.reshape(-1)),
    "scalar-map": _each(expanded_idx_to_permuted_idx=lambda index: index.sum()),
    "float-map": _each(expanded_idx_to_permuted_idx=lambda index: index.float()),
    "far-map": _each(expanded_idx_to_permuted_idx=lambda index: index + 10**6),
    "sparse-rows": _each(gemm2_permuted=lambda rows: rows.to_sparse()),
    "rows-elsewhere": _each(gemm2_permuted=lambda rows: rows.to("meta")),
}
"""Results that no producer may return."""


def consumers() -> Iterator[tuple[str, Any]]:
    """Every wrong consumer by name."""
    yield from ((f"returns-{name}", Consumer(change)) for name, change in TAIL_RESULTS.items())
    kinds = {**SIGNATURES, **RAISING}
    yield from ((name, kind(lambda output: output)) for name, kind in kinds.items() if issubclass(kind, Consumer))


def producers() -> Iterator[tuple[str, Any]]:
    """Every wrong producer by name."""
    yield from ((f"returns-{name}", Producer(change)) for name, change in LAYER_RESULTS.items())
    kinds = {**SIGNATURES, **RAISING}
    yield from ((name, kind(lambda output: output)) for name, kind in kinds.items() if issubclass(kind, Producer))
