"""A rank's part of a layer: experts and columns split exactly, biases counted once."""

from __future__ import annotations

import pytest
import torch

from moe_contract import Activation, ExpertWeights, MoELayer

from .lattice import small_layer


def parts(layer: MoELayer, tp: int, ep: int) -> list[list[MoELayer]]:
    """``parts[e][t]`` for every rank."""
    return [[layer.shard(t, tp, e, ep) for t in range(tp)] for e in range(ep)]


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (8, 1)])
def test_parts_put_together_are_the_layer(tp: int, ep: int) -> None:
    """Concatenated over columns and experts, every projection is the original, bit for bit."""
    layer = small_layer()
    grid = parts(layer, tp, ep)

    def whole(name: str, dim: int) -> torch.Tensor:
        return torch.cat([torch.cat([getattr(p.experts, name) for p in row], dim) for row in grid])

    for name, dim in {"up": 1, "gate": 1, "down": 2, "up_bias": 1, "gate_bias": 1}.items():
        assert torch.equal(whole(name, dim), getattr(layer.experts, name)), name


def test_experts_are_numbered_globally() -> None:
    """first_expert is the global id of a rank's first expert; num_experts stays that of the layer."""
    for e, row in enumerate(parts(small_layer(), 2, 2)):
        for part in row:
            assert (part.first_expert, part.num_local_experts, part.num_experts) == (2 * e, 2, 4)


def test_down_bias_is_on_one_rank_of_each_expert() -> None:
    """The reduction adds an expert's down bias once (ROWS-6): tensor-parallel rank 0 alone holds it."""
    layer = small_layer()
    for e, row in enumerate(parts(layer, 2, 2)):
        first, second = row
        assert layer.experts.down_bias is not None and first.experts.down_bias is not None
        assert torch.equal(first.experts.down_bias, layer.experts.down_bias[2 * e : 2 * e + 2])
        assert second.experts.down_bias is None


def test_shared_expert_is_split_over_all_ranks() -> None:
    """Rank ep * tp_size + tp holds its columns, and rank 0 alone the down bias."""
    layer = small_layer()
    ordered = [part.shared for row in parts(layer, 2, 2) for part in row]
    assert layer.shared is not None and all(isinstance(shared, ExpertWeights) for shared in ordered)
    ups = [shared.up for shared in ordered if shared is not None]
    assert torch.equal(torch.cat(ups, 1), layer.shared.up)
    assert [shared is not None and shared.down_bias is not None for shared in ordered] == [True, False, False, False]


def test_parts_are_compact() -> None:
    """Kernels take the address of a shard: no view of the whole."""
    for name, tensor in vars(small_layer().shard(1, 2, 1, 2).experts).items():
        assert tensor is None or tensor.is_contiguous(), name


def test_layer_without_options_shards_too() -> None:
    """No gate, no biases, no shared expert: nothing appears out of nowhere."""
    part = small_layer(Activation.RELU2, biases=False, shared=False).shard(1, 2, 1, 2)
    optional = (part.experts.gate, part.experts.up_bias, part.experts.gate_bias, part.experts.down_bias, part.shared)
    assert optional == (None,) * 5


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 3), "intermediate size 8 is not divisible by 3"),
        ((0, 1, 0, 3), "4 experts are not divisible by 3"),
        ((2, 2), "rank tp 2 of 2, ep 0 of 1 is out of range"),
        ((-1, 2), "out of range"),
        ((0, 1, 1, 1), "ep 1 of 1 is out of range"),
        ((0, 4, 0, 4), "intermediate size 8 is not divisible by 16"),
    ],
)
def test_split_that_does_not_come_out_is_refused(ranks: tuple[int, ...], message: str) -> None:
    """Sizes that do not divide, the shared expert's included, and ranks out of range are named."""
    with pytest.raises(ValueError, match=message):
        small_layer().shard(*ranks)


def test_part_cannot_be_split_again() -> None:
    """A shard of a shard would lose the global numbering."""
    with pytest.raises(ValueError, match="already is a rank's part"):
        small_layer().shard(0, 1, 0, 2).shard(0, 1, 0, 2)
