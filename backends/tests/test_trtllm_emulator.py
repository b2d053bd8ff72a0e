"""The emulator behaves as the version that it stands in for, and the adapters ask it for nothing that it lacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_backends.trtllm import Emulator, FlashInfer, bf16_producer, nvfp4_producer
from moe_backends.trtllm.bindings import bound, keywords, problems
from moe_backends.trtllm.emulator.permutation import allocated_rows, default_tile, padded_rows, place
from moe_backends.trtllm.producer import LoadedTrtllm, TrtllmProducer
from moe_backends.trtllm.returns import Entry, ReturnFormError
from moe_backends.trtllm.routing import METHODS, folding_methods, methods, pack, unpack
from moe_backends.trtllm.signatures import recorded, signature
from moe_backends.trtllm.versions import OLDEST, Version
from moe_contract import (
    Activation,
    ExpertWeights,
    MoEConfig,
    MoELayer,
    PrecomputedRouting,
    Routing,
    RoutingMethod,
    UnfinalizedMoEOutput,
    UnsupportedError,
    finalize,
)

T, K, E, H, INNER = 5, 2, 8, 256, 32
DEFERRING = MoEConfig(defer_moe_finalize=True, tp_size=2)
VERSIONS = list(recorded())


def _layer(method: RoutingMethod = RoutingMethod.RENORMALIZE, hidden: int = H, **routing: Any) -> MoELayer:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16)

    weights = ExpertWeights(draw(E, INNER, hidden), draw(E, hidden, INNER), draw(E, INNER, hidden))
    return MoELayer(hidden, E, Routing(method, K, **routing), Activation.SILU, weights)


def _batch(hidden: int = H, tokens: int = T) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16), torch.randn(
        tokens, E, generator=generator
    )


def _load(producer: TrtllmProducer, layer: MoELayer, config: MoEConfig = DEFERRING) -> LoadedTrtllm:
    loaded = producer.load(layer, config)
    assert isinstance(loaded, LoadedTrtllm)
    return loaded


@pytest.mark.parametrize(
    ("tokens", "tile", "rows"),
    [
        *((1, 8, 64), (1, 16, 128), (1, 32, 256), (128, 8, 2816), (128, 16, 4864), (128, 32, 8960)),
        *((1024, 16, 12032), (1024, 32, 16128), (1024, 64, 24320), (1024, 128, 40704)),
    ],
)
def test_row_counts_are_the_launchers(tokens: int, tile: int, rows: int) -> None:
    """E 256, K 8: what the launcher's own formula gives, for every tile that it may choose."""
    assert padded_rows(tokens, 8, 256, tile) == rows


def test_rows_fill_128_kib_from_the_version_on_that_asks_for_it() -> None:
    """T 1, K 2, E 8, H 512: 16 rows, but 128 in the buffer; bfloat16 only since 0.6.18."""
    rows = padded_rows(1, 2, 8, 8)
    assert rows == 16
    assert allocated_rows(rows, 512, Entry.BF16, Version(0, 6, 17)) == 16
    assert allocated_rows(rows, 512, Entry.BF16, Version(0, 6, 18)) == 128
    assert allocated_rows(rows, 512, Entry.FP4, Version(0, 6, 6)) == 128


def test_untuned_tile_is_the_smallest_candidate() -> None:
    """One tile below the power of two above the mean tokens of an expert."""
    assert [default_tile(t, 8, 256, fp4=False) for t in (1, 256, 1024, 4096)] == [8, 8, 16, 64]
    assert default_tile(10**6, 8, 256, fp4=False) == 64
    assert default_tile(10**6, 8, 256, fp4=True) == 128


def test_order_within_a_segment_differs_and_everything_else_does_not() -> None:
    """Unique rows, segments from multiples of the tile, absent routes -1; another seed moves rows within segments."""
    local = torch.randint(-1, E, (33, 4), generator=torch.Generator().manual_seed(3))
    first, second = (place(local, E, 8, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert not torch.equal(first, second)
    for index in (first, second):
        used = index[index >= 0]
        assert len(used.unique()) == len(used) == int((local >= 0).sum())
        assert torch.equal(index < 0, local.flatten() < 0)
        start = 0
        for expert in range(E):
            mine = index[local.flatten() == expert]
            assert mine.min() == start and mine.max() == start + len(mine) - 1
            start += -(-len(mine) // 8) * 8


@pytest.mark.parametrize("version", VERSIONS, ids=str)
@pytest.mark.parametrize("make", [bf16_producer, nvfp4_producer])
def test_adapters_work_with_every_version(make: Any, version: Version) -> None:
    """Signatures, return forms and labels of each: deferred, finalized, float32 and bfloat16 logits, precomputed."""
    producer = make(Emulator(version), emulated=True)
    assert producer.declaration.version == str(version)
    hidden, logits = _batch()
    for given in (logits, logits.to(torch.bfloat16)):
        pending = _load(producer, _layer())(hidden, given)
        assert isinstance(pending, UnfinalizedMoEOutput)
        assert pending.expert_weights.dtype is torch.bfloat16
        assert float(pending.expert_weights.float().sum(1).sub(1).abs().max()) < 2.0**-7
        whole = _load(producer, _layer(), MoEConfig())(hidden, given)
        assert isinstance(whole, Tensor)
        assert torch.equal(finalize(pending), whole)
    routed = PrecomputedRouting(torch.tensor([[0, 3]] * T, dtype=torch.int32), torch.full((T, K), 0.5))
    assert isinstance(_load(producer, _layer(RoutingMethod.PRECOMPUTED))(hidden, routed), UnfinalizedMoEOutput)


@pytest.mark.parametrize("version", VERSIONS, ids=str)
def test_every_call_binds_to_the_recorded_signature(version: Version) -> None:
    """Keywords and nothing but keywords that the version has, and all that it requires."""
    assert not problems(version, recorded()[version])
    for entry in Entry:
        signature(version, entry.value).bind(**dict.fromkeys(keywords(entry, version)))


def test_drift_of_a_signature_is_reported() -> None:
    """A renamed parameter and a new required one are both named."""
    known = recorded()[VERSIONS[-1]]
    renamed = [["router_logits"] if each[0] == "routing_logits" else each for each in known[Entry.BF16.value]]
    found = problems(VERSIONS[-1], {**known, Entry.BF16.value: renamed})
    assert found == ["trtllm_bf16_moe has no parameter routing_logits", "trtllm_bf16_moe also requires router_logits"]


def test_argument_that_a_version_lacks_is_refused_where_it_matters() -> None:
    """0.6.7 has no activation_type for bfloat16: Swiglu is what it does anyway, Relu2 is not."""
    old, entry = Version(0, 6, 7), Entry.BF16
    assert bound(entry, old, {"activation_type": 3, "norm_topk_prob": True, "routing_replay_out": None}) == {}
    for name, value in (("activation_type", 6), ("norm_topk_prob", False), ("routing_replay_out", torch.zeros(1))):
        with pytest.raises(UnsupportedError, match=rf"0\.6\.7 trtllm_bf16_moe has no parameter {name}"):
            bound(entry, old, {name: value})


def test_folding_table_follows_the_versions() -> None:
    """MiniMax2 folds since 0.6.13 and exists since 0.6.8; DeepSeek-V3 always folds; nothing else ever does."""
    assert folding_methods(OLDEST) == {RoutingMethod.DEEPSEEK_V3}
    assert RoutingMethod.MINIMAX2 in methods(Version(0, 6, 12)) - folding_methods(Version(0, 6, 12))
    assert folding_methods(Version(0, 6, 13)) == {RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2}
    assert methods(Version(0, 6, 18)) == set(METHODS)


def test_packed_routing_can_be_undone() -> None:
    """Ids in the high half, bfloat16 bits in the low one, negative ids and weights included."""
    weights = torch.tensor([[0.5, -1.25], [3e-5, 0.0]]).to(torch.bfloat16)
    ids = torch.tensor([[0, 255], [-1, 895]], dtype=torch.int32)
    found = unpack(pack(PrecomputedRouting(ids, weights)))
    assert torch.equal(found.ids, ids) and torch.equal(found.weights, weights)


@pytest.mark.parametrize("make", [bf16_producer, nvfp4_producer])
def test_replay_buffer_is_written(make: Any) -> None:
    """The engine's buffer gets each call's experts in its first T rows, and the rest stays."""
    loaded = _load(make(Emulator(), emulated=True), _layer())
    loaded.routing_replay_out = torch.full((T + 2, K), -7, dtype=torch.int16)
    hidden, logits = _batch()
    loaded(hidden, logits)
    assert torch.equal(loaded.routing_replay_out[:T].long(), logits.topk(K).indices)
    assert bool((loaded.routing_replay_out[T:] == -7).all())


def test_replay_is_refused_where_the_call_has_no_parameter_for_it() -> None:
    """Precomputed NVFP4 routing has none: a buffer that is never written must not look like a recorded routing."""
    loaded = _load(nvfp4_producer(Emulator(), emulated=True), _layer(RoutingMethod.PRECOMPUTED))
    loaded.routing_replay_out = torch.zeros(T, K, dtype=torch.int16)
    routed = PrecomputedRouting(torch.zeros(T, K, dtype=torch.int32), torch.ones(T, K))
    with pytest.raises(UnsupportedError, match="routing_replay_out"):
        loaded(_batch()[0], routed)


@pytest.mark.parametrize(("make", "hidden"), [(bf16_producer, 2880), (bf16_producer, 320), (nvfp4_producer, 2688)])
def test_padded_width_is_finalized(make: Any, hidden: int) -> None:
    """gpt-oss's and Nemotron-3-Nano's widths are padded, so the layer finalizes and comes back at its own width."""
    producer = make(Emulator(), emulated=True)
    assert not producer.declaration.defers(RoutingMethod.RENORMALIZE, hidden)
    output = _load(producer, _layer(hidden=hidden))(*_batch(hidden))
    assert isinstance(output, Tensor) and output.shape == (T, hidden) and output.is_contiguous()


def test_llama4_is_finalized() -> None:
    """Its weight is in the rows, so they are never handed over (ROWS-3)."""
    producer = bf16_producer(Emulator(), emulated=True)
    layer = _layer(RoutingMethod.LLAMA4)
    layer = replace(layer, routing=replace(layer.routing, top_k=1))
    assert isinstance(_load(producer, layer)(*_batch()), Tensor)


@pytest.mark.parametrize("make", [bf16_producer, nvfp4_producer])
def test_no_tokens_are_answered_before_the_call(make: Any) -> None:
    """The launcher would end the process; the emulator raises, and is not reached."""
    loaded = _load(make(Emulator(), emulated=True), _layer())
    assert loaded(*_batch(tokens=0)).shape == (0, H)
    with pytest.raises(RuntimeError, match="ends the process"):
        loaded.producer.entry_points.call(
            Entry.BF16, {**dict.fromkeys(keywords(Entry.BF16, Version(0, 6, 18))), "hidden_states": torch.zeros(0, H)}
        )


def test_unknown_version_is_refused_not_guessed() -> None:
    """A version after the newest known one computes, but its results are not interpreted."""
    producer = bf16_producer(Emulator(Version(0, 9, 0)), emulated=True)
    with pytest.raises(ReturnFormError, match=r"0\.9\.0"):
        _load(producer, _layer())(*_batch())


def test_machine_without_flashinfer_says_so() -> None:
    """The real adapters import, declare and refuse with the reason; loading is never an abort."""
    engine = FlashInfer()
    reason = engine.unavailable(torch.device("cpu"))
    assert "flashinfer is not installed" in reason or "cuda, not on cpu" in reason
    for make in (bf16_producer, nvfp4_producer):
        assert make().unavailable("cpu") == reason
        with pytest.raises(UnsupportedError, match="CAP-2"):
            make().load(_layer(), DEFERRING)
