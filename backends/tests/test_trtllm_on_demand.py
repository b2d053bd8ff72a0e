"""Large layers are prepared expert by expert in the emulator, and give what layers that are prepared whole give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_backends.trtllm import Emulator, FlashInfer, TrtllmProducer, bf16_producer, nvfp4_producer
from moe_backends.trtllm.calls import Bf16Format, Format
from moe_backends.trtllm.declare import declare_bf16
from moe_backends.trtllm.emulator import on_demand
from moe_backends.trtllm.emulator.on_demand import OnDemandTensor
from moe_backends.trtllm.emulator.recent import Recent
from moe_contract import (
    Activation,
    ExpertWeights,
    MoEConfig,
    MoELayer,
    Routing,
    RoutingMethod,
    UnfinalizedMoEOutput,
    finalize,
)

T, K, E, H, INNER = 5, 2, 8, 256, 36
DEFERRING = MoEConfig(defer_moe_finalize=True, tp_size=2)
MAKERS = [bf16_producer, nvfp4_producer]


def _layer(activation: Activation = Activation.SILU) -> MoELayer:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    gate = draw(E, INNER, H) if activation.gated else None
    return MoELayer(
        H,
        E,
        Routing(RoutingMethod.RENORMALIZE, K),
        activation,
        ExpertWeights(draw(E, INNER, H), draw(E, H, INNER), gate),
    )


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(T, H, generator=generator).to(torch.bfloat16), torch.randn(T, E, generator=generator)


def _finalized(producer: TrtllmProducer, layer: MoELayer) -> Tensor:
    output = producer.load(layer, DEFERRING)(*_batch())
    assert isinstance(output, UnfinalizedMoEOutput)
    return finalize(output)


@pytest.fixture
def everything_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The size from which layers are large, put below that of the tests' own."""
    monkeypatch.setattr(on_demand, "LARGEST_WHOLE", 0)


@pytest.mark.parametrize("activation", [Activation.SILU, Activation.RELU2])
@pytest.mark.parametrize("make", MAKERS)
def test_large_layers_give_the_same_bits(make: Any, activation: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preparation treats experts independently, and so do the GEMMs."""
    layer = _layer(activation)
    whole = _finalized(make(Emulator(), emulated=True), layer)
    monkeypatch.setattr(on_demand, "LARGEST_WHOLE", 0)
    loaded = make(Emulator(), emulated=True).load(layer, DEFERRING)
    assert isinstance(loaded.weights["gemm1_weights"], OnDemandTensor)
    assert torch.equal(finalize(loaded(*_batch())), whole)


@pytest.mark.usefixtures("everything_is_large")
@pytest.mark.parametrize("make", MAKERS)
def test_written_weights_are_prepared_anew(make: Any) -> None:
    """What was prepared of a weight that has since been written is not used."""
    producer, layer = make(Emulator(), emulated=True), _layer()
    before = _finalized(producer, layer)
    layer.experts.down.mul_(2.0)
    assert torch.equal(_finalized(producer, layer), 2.0 * before)


@dataclass(frozen=True)
class _SwappedFormat(Bf16Format):
    def prepare(self, weights: ExpertWeights) -> Mapping[str, object]:
        assert weights.gate is not None
        return super().prepare(replace(weights, up=weights.gate, gate=weights.up))


@pytest.mark.usefixtures("everything_is_large")
def test_wrong_preparation_gives_wrong_numbers_after_a_right_one() -> None:
    """Two weight formats on one layer never share what was prepared."""

    def producer(weight_format: Format) -> TrtllmProducer:
        engine = Emulator()
        return TrtllmProducer(declare_bf16(engine.version, emulated=True), engine, weight_format)

    layer = _layer()
    right, wrong = _finalized(producer(Bf16Format()), layer), _finalized(producer(_SwappedFormat()), layer)
    assert not torch.allclose(right.float(), wrong.float(), atol=0.1, rtol=0.1)


def test_rows_outside_their_place_are_read_from_where_they_are() -> None:
    """Padding is recognised by its zeros: weights shifted into it still count, at the place where they stand."""
    engine, layer = Emulator(), _layer()

    class Shifted(Bf16Format):
        def prepare(self, weights: ExpertWeights) -> Mapping[str, object]:
            prepared = super().prepare(weights)
            gemm1 = prepared["gemm1_weights"]
            assert isinstance(gemm1, Tensor)
            return {**prepared, "gemm1_weights": gemm1.roll(64, 2)}

    right = _finalized(bf16_producer(engine, emulated=True), layer)
    shifted = TrtllmProducer(declare_bf16(engine.version, emulated=True), engine, Shifted())
    assert not torch.equal(_finalized(shifted, layer), right)


def test_real_kernels_are_given_every_expert() -> None:
    """Only the emulator asks for experts one by one."""
    assert FlashInfer().on_demand(_layer().experts, Bf16Format()) is None


def test_only_so_much_is_kept() -> None:
    """The least recently used results go first, and all of a tensor that is gone."""
    recent: Recent[int] = Recent(size=lambda value: value, most=10)
    owners, made = [torch.zeros(1)], []

    def make(key: int, value: int) -> int:
        made.append(key)
        return value

    for key in (1, 2, 1, 3, 1, 2):
        assert recent.get(owners[0], key, lambda key=key: make(key, 4)) == 4  # type: ignore[misc]  # a lambda's default
    assert made == [1, 2, 3, 2]
    owners[0] = torch.zeros(1)
    recent.get(owners[0], 1, lambda: 1)
    assert len(recent._known) == 1
