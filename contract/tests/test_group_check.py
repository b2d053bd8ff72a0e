"""MAP-5 over the outputs of one expert-parallel group."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moe_contract import MoEOutput, UnfinalizedMoEOutput
from moe_contract.checks import check_expert_parallel_group

from .lattice import H, T, lattice, layered, only, triple


def split(*valid_slots: tuple[int, ...]) -> list[UnfinalizedMoEOutput]:
    """One output per rank; rank r keeps the slots ``valid_slots[r]`` of every token."""
    outputs = []
    for slots in valid_slots:
        mapped = torch.full_like(triple().expanded_idx_to_permuted_idx, -1)
        mapped[:, list(slots)] = triple().expanded_idx_to_permuted_idx[:, list(slots)]
        outputs.append(replace(triple(), expanded_idx_to_permuted_idx=mapped))
    return outputs


def test_every_route_on_one_rank_is_right() -> None:
    """However unevenly the routes are split, and in whichever project's objects."""
    assert check_expert_parallel_group(split((0, 1), (2,))) == []
    assert check_expert_parallel_group(split((), (0, 1, 2), ())) == []
    foreign = [MoEOutput(output) for output in split((0,), (1, 2))]
    assert check_expert_parallel_group([SimpleNamespace(**vars(foreign[0].routed)), foreign[1]]) == []


def test_lost_route_is_named() -> None:
    """A route that no rank has is MAP-5 at its first token."""
    violation = only(check_expert_parallel_group(split((0,), (2,))))
    assert (violation.clause, violation.token, violation.slot, violation.count) == ("MAP-5", 0, 1, T)
    assert violation.got == "valid on no rank" and violation.expected == "valid on exactly one of 2 ranks"


def test_route_claimed_twice_names_both_ranks() -> None:
    """A route that two ranks have would be counted twice."""
    outputs = split((0, 1), (), (2,))
    outputs[2].expanded_idx_to_permuted_idx[3, 1] = 0
    violation = only(check_expert_parallel_group(outputs))
    assert (violation.token, violation.slot, violation.count) == (3, 1, 1)
    assert violation.got == "valid on ranks 0, 2"


@pytest.mark.parametrize(
    ("second", "clause", "got"),
    [
        (lattice(T, H), "DEFER-1", "a finalized tensor"),
        (None, "OUT-1", "no map on NoneType"),
        (replace(triple(), expanded_idx_to_permuted_idx=torch.zeros(2, 3, dtype=torch.int32)), "MAP-1", "[2, 3]"),
    ],
)
def test_rank_that_cannot_be_compared_is_named(second: object, clause: str, got: str) -> None:
    """A rank whose output has no comparable map is blamed, not the routes."""
    violation = only(check_expert_parallel_group([triple(), second]))
    assert (violation.clause, violation.rank) == (clause, 1) and got in violation.got


@pytest.mark.parametrize("outputs", [[lattice(0, H)] * 2, [layered(lattice(T, H))] * 2], ids=["bare", "layered"])
def test_finalized_group_has_no_map_to_compare(outputs: list[Tensor | MoEOutput]) -> None:
    """Where every rank finalized there is nothing to say."""
    assert check_expert_parallel_group(outputs) == []
