"""One function becomes a backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from moe_contract import (
    Consumer,
    MoEConfig,
    MoEOutput,
    Producer,
    QuantFormat,
    QuantRecipe,
    TailCapacity,
    TailOutput,
    consumer,
    producer,
)

from .helpers import H, K, LonelyGroup, T, lattice, small_layer, triple

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


@pytest.mark.parametrize("make", [producer, consumer])
def test_mistyped_declaration_is_refused_at_once(make: Any) -> None:
    """Unknown or impossible words are errors where the backend is written."""
    with pytest.raises(ValidationError, match="max_topk"):
        make(name="x", max_topk=8)
    with pytest.raises(ValidationError, match="max_top_k"):
        make(name="x", max_top_k=0)
    with pytest.raises(ValidationError, match="name"):
        make()
