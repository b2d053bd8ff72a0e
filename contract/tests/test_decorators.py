"""One function becomes a backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_contract import (
    Consumer,
    ConsumerDeclaration,
    MoEConfig,
    MoEOutput,
    PlugInError,
    Producer,
    ProducerDeclaration,
    QuantFormat,
    QuantRecipe,
    TailCapacity,
    TailOutput,
    consumer,
    producer,
)

from .lattice import H, K, LonelyGroup, T, lattice, small_layer, triple

CAPACITY = TailCapacity(T, H, K, torch.bfloat16)


def test_function_becomes_a_producer() -> None:
    """It gets the layer and the live config at every call."""
    seen: list[Any] = []

    @producer(name="mine", max_top_k=8)
    def run(layer: object, config: MoEConfig, hidden_states: Tensor, router_logits: Tensor) -> object:
        seen.append((layer, config.defer_moe_finalize))
        return triple() if config.should_defer(len(hidden_states)) else hidden_states

    assert isinstance(run, Producer) and (run.declaration.name, run.declaration.max_top_k) == ("mine", 8)
    layer, config = small_layer(), MoEConfig(tp_size=2)
    loaded = run.load(layer, config)
    assert isinstance(loaded(lattice(T, H), lattice(T, 4)), Tensor)
    config.defer_moe_finalize = True
    assert not isinstance(loaded(lattice(T, H), lattice(T, 4)), Tensor)
    assert seen == [(layer, False), (layer, True)]


def test_function_becomes_a_consumer() -> None:
    """A tuple becomes a TailOutput; the group is the one it was opened with."""

    @consumer(name="tail")
    def run(group: LonelyGroup, output: MoEOutput, residual: Tensor, norm_weight: Tensor, **rest: Any) -> object:
        assert rest == {"eps": 1e-6, "weight_bias": 1.0}
        return residual * group.size, residual

    assert isinstance(run, Consumer) and run.declaration.name == "tail"
    tail = run.open(LonelyGroup(size=4), CAPACITY)
    result = tail(MoEOutput(triple()), lattice(T, H), lattice(H), eps=1e-6, weight_bias=1.0)
    assert isinstance(result, TailOutput) and result.quant_out is None
    assert torch.equal(result.residual_out, 4 * lattice(T, H))
    tail.close()


def test_quant_is_passed_only_when_asked_for() -> None:
    """A function without a quant argument works until a quantised output is asked of it."""

    @consumer(name="quantising", quant_formats={QuantFormat.FP8_STATIC})
    def run(group: object, output: object, residual: Tensor, norm_weight: Tensor, **rest: Any) -> TailOutput:
        return TailOutput(residual, residual, quant_out=residual if "quant" in rest else None)

    tail = run.open(LonelyGroup(), CAPACITY)
    call = (MoEOutput(triple()), lattice(T, H), lattice(H))
    recipe = QuantRecipe(QuantFormat.FP8_STATIC)
    assert tail(*call, eps=1e-6, quant=None).quant_out is None
    assert tail(*call, eps=1e-6, quant=recipe).quant_out is not None


def test_options_that_a_call_leaves_out_get_the_protocols_defaults() -> None:
    """A function that names weight_bias without a default is right."""

    @consumer(name="strict")
    def run(
        group: object, output: object, residual: Tensor, norm_weight: Tensor, *, eps: float, weight_bias: float
    ) -> object:
        return residual + weight_bias, residual

    tail = run.open(LonelyGroup(), CAPACITY)
    result = tail(MoEOutput(triple()), lattice(T, H), lattice(H), eps=1e-6)
    assert torch.equal(result.residual_out, lattice(T, H))


def _two_arguments(output: object, residual: Tensor) -> None: ...


def _without_weight_bias(group: object, output: object, residual: Tensor, norm_weight: Tensor, eps: float) -> None: ...


def _wants_quant(
    group: object,
    output: object,
    residual: Tensor,
    norm_weight: Tensor,
    *,
    eps: float,
    weight_bias: float,
    quant: object,
) -> None: ...


def _never_quant(
    group: object, output: object, residual: Tensor, norm_weight: Tensor, *, eps: float, weight_bias: float
) -> None: ...


def _three_arguments(layer: object, hidden_states: Tensor, router_logits: Tensor) -> None: ...


class _Called:
    def __call__(self, layer: object) -> None: ...


@pytest.mark.parametrize(
    ("make", "function", "expected"),
    [
        (consumer(name="x"), _two_arguments, "_two_arguments is called with (group, output, residual, norm_weight, "),
        (consumer(name="x"), _two_arguments, "eps=..., weight_bias=...), but takes (output, residual): too many"),
        (consumer(name="x"), _without_weight_bias, "norm_weight, eps): got an unexpected keyword"),
        (consumer(name="x"), _wants_quant, "missing a required argument: 'quant'"),
        (consumer(name="x", quant_formats={"fp8-static"}), _never_quant, "got an unexpected keyword argument 'quant'"),
        (
            producer(name="x"),
            _three_arguments,
            "_three_arguments is called with (layer, config, hidden_states, router_logits), but takes (layer, "
            "hidden_states, router_logits): too many positional arguments",
        ),
        (producer(name="x"), _Called(), "_Called is called with (layer, config, hidden_states, router_logits), but"),
        (producer(name="x"), 5, "expected a function: got a int"),
    ],
)  # fmt: skip
def test_function_that_takes_other_arguments_is_refused_where_it_is_written(
    make: Any, function: Any, expected: str
) -> None:
    """One line: the function's own place, the call that it will get, and what it takes."""
    with pytest.raises(PlugInError) as caught:
        make(function)
    message = str(caught.value)
    assert expected in message and "\n" not in message
    assert function == 5 or message.startswith("test_decorators.py:")


def test_function_whose_arguments_cannot_be_known_is_taken() -> None:
    """Compiled code has no signature; it is judged by calling it."""
    assert isinstance(producer(name="compiled")(max), Producer)


@pytest.mark.parametrize(("length", "kind"), [(1, tuple), (2, TailOutput), (4, TailOutput), (5, tuple)])
def test_only_a_tuple_of_a_tail_outputs_fields_becomes_one(length: int, kind: type) -> None:
    """Another one is handed on, so that its reader can say what came."""
    run = consumer(name="x")(lambda group, output, residual, norm_weight, **rest: (residual,) * length)
    tail = run.open(LonelyGroup(), CAPACITY)
    assert type(tail(MoEOutput(triple()), lattice(T, H), lattice(H), eps=1e-6)) is kind


@pytest.mark.parametrize("make", [producer, consumer, ProducerDeclaration, ConsumerDeclaration])
@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        ({"name": "x", "max_topk": 8}, "Declaration of 'x': there is no field 'max_topk'; did you mean 'max_top_k'?"),
        ({"name": "x", "max_top_k": 0}, "max_top_k: got 0, expected greater than or equal to 1"),
        ({}, "name is missing: add name=..."),
        ({"name": "x", "dtypes": {"bf16"}}, "dtypes: got 'bf16', expected 'bfloat16' or 'float16'; did you mean 'bf"),
        ({"name": "x", "dtypes": "bfloat16"}, "dtypes: got 'bfloat16', expected a set such as {...}"),
        ({"name": "x", "determinism": "a" * 99}, "determinism: got 'aaaa"),
    ],
)  # fmt: skip
def test_mistyped_declaration_is_refused_at_once_in_one_line(
    make: Any, declared: dict[str, Any], expected: str
) -> None:
    """Unknown or impossible words are errors at the line where the backend is written."""
    with pytest.raises(PlugInError) as caught:
        make(**declared)
    message = str(caught.value)
    assert message.startswith("test_decorators.py:") and expected in message
    assert "\n" not in message and len(message) < 300 and "help(moe_contract." in message
