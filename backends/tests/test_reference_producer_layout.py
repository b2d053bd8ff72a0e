"""How the reference producer lays out, poisons and owns what it emits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_backends.reference.producer import ReferenceProducer, declare
from moe_contract import Activation, MoEConfig, PrecomputedRouting, Routing, RoutingMethod, UnfinalizedMoEOutput
from moe_contract.checks import Expectation, check, check_expert_parallel_group

from .reference_producer_layers import (
    DEFERRING,
    FINALIZING,
    NUM_EXPERTS,
    TOP_K,
    TOPK,
    VARIANTS,
    deferred,
    finalized,
    ids_of,
    lattice_batch,
    lattice_layer,
)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_rows_that_no_entry_names_are_poison(variant: str) -> None:
    """Every row outside the map's image is NaN, every row inside it finite, and P exceeds every entry."""
    layer = lattice_layer().shard(0, 1, 1, 2)
    output = deferred(layer, *lattice_batch(17), variant)
    rows, row_of = output.gemm2_permuted, output.expanded_idx_to_permuted_idx
    named = torch.zeros(rows.shape[0], dtype=torch.bool)
    named[row_of[row_of >= 0].long()] = True
    assert rows.shape[0] > row_of.max()
    assert rows[~named].isnan().all()
    assert (~named).any()
    assert rows[named].isfinite().all()


@pytest.mark.parametrize("tile", [1, 8, 32])
def test_expert_segments_start_at_tiles(tile: int) -> None:
    """A tile holds rows of one expert only, experts ascend, and the first row of each starts a tile."""
    producer = ReferenceProducer(declare("tiled", tile=tile))
    hidden, logits = lattice_batch(33)
    output = producer.load(lattice_layer(), DEFERRING)(hidden, logits)
    assert isinstance(output, UnfinalizedMoEOutput)
    ids, row_of = ids_of(logits), output.expanded_idx_to_permuted_idx
    firsts = [int(row_of[ids == expert].min()) for expert in ids.unique().tolist()]
    assert all(first % tile == 0 for first in firsts)
    assert firsts == sorted(firsts)
    experts_of_tile = [ids[row_of // tile == index].unique() for index in (row_of // tile).unique().tolist()]
    assert tile == 1 or all(len(experts) == 1 for experts in experts_of_tile)


def test_route_major_map_is_the_identity() -> None:
    """Route-major rows: the map is t * K + k or -1, P is T * K, and the flag is set."""
    output = deferred(lattice_layer().shard(0, 1, 1, 2), *lattice_batch(5), "route_major")
    row_of = output.expanded_idx_to_permuted_idx.flatten()
    assert output.route_major
    assert output.gemm2_permuted.shape[0] == 5 * TOP_K
    identity = torch.arange(5 * TOP_K, dtype=torch.int32)
    assert torch.equal(row_of[row_of >= 0], identity[row_of >= 0])
    assert 0 < (row_of == -1).sum() < row_of.numel()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_repeats_give_the_same_bits(variant: str) -> None:
    """Two calls on the same inputs agree bit for bit, padding included (NUM-2)."""
    layer = lattice_layer(activation=Activation.SILU)
    hidden, logits = lattice_batch(17)
    first, second = (deferred(layer, hidden, logits, variant) for _ in range(2))
    assert torch.equal(first.gemm2_permuted.view(torch.int16), second.gemm2_permuted.view(torch.int16))
    assert torch.equal(first.expert_weights, second.expert_weights)
    assert torch.equal(first.expanded_idx_to_permuted_idx, second.expanded_idx_to_permuted_idx)


def tensors_of(output: UnfinalizedMoEOutput) -> list[Tensor]:
    """The three tensors."""
    return [output.gemm2_permuted, output.expert_weights, output.expanded_idx_to_permuted_idx]


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_an_output_outlives_the_next_call(variant: str) -> None:
    """A second call of the same loaded producer shares no memory with the first one's output (OUT-5)."""
    loaded = VARIANTS[variant].load(lattice_layer(), DEFERRING)
    first = loaded(*lattice_batch(17))
    kept = [tensor.clone() for tensor in tensors_of(first)]
    second = loaded(*lattice_batch(17, seed=9))
    for before, tensor, other in zip(kept, tensors_of(first), tensors_of(second), strict=True):
        assert torch.equal(before.nan_to_num(), tensor.nan_to_num())
        assert tensor.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("config", [DEFERRING, FINALIZING], ids=["deferred", "finalized"])
def test_inputs_are_not_written_and_outputs_need_no_grad(config: MoEConfig) -> None:
    """Hidden states, logits and weights keep their bits, and no output inherits their grad (OUT-3, OUT-4)."""
    layer = lattice_layer(biases=True)
    hidden, logits = (tensor.requires_grad_() for tensor in lattice_batch(17))
    given = [hidden, logits, *(tensor for tensor in vars(layer.experts).values() if tensor is not None)]
    before = [tensor.detach().clone() for tensor in given]
    output = VARIANTS["backend"].load(layer, config)(hidden, logits)
    assert all(torch.equal(was, now) for was, now in zip(before, given, strict=True))
    emitted = [output] if isinstance(output, Tensor) else tensors_of(output)
    assert not any(tensor.requires_grad for tensor in emitted)


def test_precomputed_routing_is_not_aliased() -> None:
    """The output's weights are not the caller's tensor, which it may overwrite while the output is pending."""
    layer = lattice_layer(routing=Routing(RoutingMethod.PRECOMPUTED, TOP_K))
    hidden, _ = lattice_batch(5)
    given = PrecomputedRouting(torch.zeros(5, TOP_K, dtype=torch.int64), torch.ones(5, TOP_K, dtype=torch.bfloat16))
    output = deferred(layer, hidden, given)
    given.weights.zero_()
    assert (output.expert_weights == 1).all()


def test_route_to_no_local_expert_still_gives_a_triple() -> None:
    """A rank that holds none of the chosen experts emits a map of -1 over poison, and finalizes to zeros."""
    layer = lattice_layer(routing=TOPK).shard(0, 1, 1, 2)
    hidden, logits = lattice_batch(5)
    logits[:, : NUM_EXPERTS // 2] += 10.0
    output = deferred(layer, hidden, logits)
    assert (output.expanded_idx_to_permuted_idx == -1).all()
    assert output.gemm2_permuted.shape[0] >= 1
    assert output.gemm2_permuted.isnan().all()
    assert not finalized(layer, hidden, logits).any()


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("config", [DEFERRING, FINALIZING], ids=["deferred", "finalized"])
@pytest.mark.parametrize("num_tokens", [0, 1, 17])
def test_the_contracts_checks_find_nothing(variant: str, config: MoEConfig, num_tokens: int) -> None:
    """Each rank's output is what its declaration promises, and the expert-parallel group fits together."""
    producer, layer = VARIANTS[variant], lattice_layer(biases=True)
    outputs = []
    for rank in range(2):
        part = layer.shard(0, 1, rank, 2)
        outputs.append(producer.load(part, config)(*lattice_batch(num_tokens)))
        expected = Expectation.of_call(producer.declaration, part, config, num_tokens, rank)
        assert check(outputs[rank], expected) == []
    if isinstance(outputs[0], UnfinalizedMoEOutput):
        assert check_expert_parallel_group(outputs) == []
