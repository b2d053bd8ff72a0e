"""The permutation: a vectorised map against a plain loop, its alignment and its poison."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_backends.reference.permutation import expert_major, route_major


def looped_map(local_ids: Tensor, num_local_experts: int, tile: int) -> tuple[list[list[int]], int]:
    """The map and the end of the last segment, one route at a time."""
    rows = [[-1] * local_ids.shape[1] for _ in range(local_ids.shape[0])]
    start = 0
    for expert in range(num_local_experts):
        row = start
        for token, slots in enumerate(local_ids.tolist()):
            for slot, chosen in enumerate(slots):
                if chosen == expert:
                    rows[token][slot] = row
                    row += 1
        start = -(-row // tile) * tile
    return rows, start


@st.composite
def routed_batches(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """Local ids with absent slots and repeated experts, the number of experts, and a tile."""
    experts = draw(st.integers(1, 9))
    top_k = draw(st.integers(1, 4))
    slots = st.lists(st.integers(-1, experts - 1), min_size=top_k, max_size=top_k)
    tokens = draw(st.lists(slots, max_size=12))
    ids = torch.tensor(tokens, dtype=torch.int64).reshape(len(tokens), top_k)
    return ids, experts, draw(st.sampled_from([1, 3, 8, 16]))


@settings(max_examples=200, deadline=None)
@given(routed_batches())
def test_vectorised_map_equals_the_loop(batch: tuple[Tensor, int, int]) -> None:
    """Experts ascending, tokens in order, segments at multiples of the tile, absent slots -1."""
    ids, experts, tile = batch
    permutation = expert_major(ids, experts, tile)
    rows, end = looped_map(ids, experts, tile)
    assert permutation.map.dtype == torch.int32
    assert permutation.map.is_contiguous()
    assert permutation.map.tolist() == rows
    assert permutation.num_rows == end + tile


@settings(max_examples=100, deadline=None)
@given(routed_batches())
def test_every_unreferenced_row_is_poison(batch: tuple[Tensor, int, int]) -> None:
    """Rows land where the map says, and every other row is NaN."""
    ids, experts, tile = batch
    for permutation in (expert_major(ids, experts, tile), route_major(ids)):
        present = permutation.map >= 0
        values = torch.arange(1, int(present.sum()) + 1, dtype=torch.float32)
        placed = permutation.scatter(values[:, None].expand(-1, 3))
        named = permutation.map[present].long()
        assert torch.equal(placed[named, 0], values)
        unnamed = torch.ones(permutation.num_rows, dtype=torch.bool)
        unnamed[named] = False
        assert placed[unnamed].isnan().all()


def test_the_last_row_is_never_live() -> None:
    """P is larger than every entry even without padding between segments, and 1 where nothing is local."""
    assert expert_major(torch.tensor([[0, 1]]), 2, tile=1).num_rows == 3
    assert expert_major(torch.tensor([[-1, -1]]), 2, tile=1).num_rows == 1
    assert expert_major(torch.tensor([[-1, -1]]), 2, tile=8).num_rows == 8


def test_route_major_is_the_identity_except_for_absent_slots() -> None:
    """Row t * K + k is route (t, k), and P is T * K."""
    permutation = route_major(torch.tensor([[3, -1, 0], [-1, 2, 2]]))
    assert permutation.map.tolist() == [[0, -1, 2], [-1, 4, 5]]
    assert permutation.map.dtype == torch.int32
    assert permutation.num_rows == 6


def test_a_tile_below_one_is_refused() -> None:
    """A tile is a number of rows."""
    with pytest.raises(ValueError, match="tile must be at least 1, got 0"):
        expert_major(torch.zeros(1, 1, dtype=torch.int64), 1, tile=0)
