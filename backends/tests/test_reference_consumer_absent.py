"""What must not reach a result (absent slots, unnamed rows) and what must (NaN in a named row)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_backends.reference.consumer import PROFILE_A, PROFILE_B, PROFILE_C
from moe_backends.reference.local_sum import local_sum
from moe_contract import ConsumerDeclaration, MoEOutput, ScalePlacement, UnfinalizedMoEOutput

PROFILES = pytest.mark.parametrize("declaration", [PROFILE_A, PROFILE_B, PROFILE_C], ids=lambda d: d.name)
PLACEMENTS = pytest.mark.parametrize("placement", list(ScalePlacement))
NAN = math.nan


def output(
    rows: list[list[float]],
    weights: list[list[float]],
    index_map: list[list[int]],
    width: int = 2,
    shared: list[list[float]] | None = None,
) -> MoEOutput:
    """A bfloat16 output with scale 2."""
    triple = UnfinalizedMoEOutput(
        torch.tensor(rows, dtype=torch.bfloat16).reshape(len(rows), width),
        torch.tensor(weights, dtype=torch.bfloat16),
        torch.tensor(index_map, dtype=torch.int32),
    )
    return MoEOutput(triple, None if shared is None else torch.tensor(shared, dtype=torch.bfloat16), 2.0)


def bits(tensor: Tensor) -> list[list[int]]:
    """The bit patterns, which tell +0 from -0."""
    return tensor.view(torch.int16).tolist()


@PROFILES
@PLACEMENTS
def test_absent_slot_adds_nothing_even_when_its_weight_and_row_zero_are_nan(
    declaration: ConsumerDeclaration, placement: ScalePlacement
) -> None:
    """A -1 slot is skipped whatever its weight, the first row and the last row hold."""
    case = output([[NAN, NAN], [1.0, 2.0], [NAN, NAN]], [[NAN, 0.5], [0.5, math.inf]], [[-1, 1], [1, -1]])
    assert local_sum(case, declaration.profile, placement).tolist() == [[1.0, 2.0], [1.0, 2.0]]


@PROFILES
@PLACEMENTS
def test_token_without_experts_here_gets_the_shared_output_alone(
    declaration: ConsumerDeclaration, placement: ScalePlacement
) -> None:
    """All slots -1: the shared output, not scaled, and exactly +0 where there is none."""
    case = output([[NAN, NAN]], [[NAN, -1.0]], [[-1, -1]], shared=[[3.0, -5.0]])
    assert local_sum(case, declaration.profile, placement).tolist() == [[3.0, -5.0]]
    alone = output([[NAN, NAN]], [[NAN, -1.0]], [[-1, -1]])
    assert bits(local_sum(alone, declaration.profile, placement)) == [[0, 0]]


@PROFILES
def test_rank_without_any_row_gets_the_shared_output_alone(declaration: ConsumerDeclaration) -> None:
    """P = 0 is legal where every slot is -1: there is no row that could be read in its place."""
    case = output([], [[NAN], [1.0]], [[-1], [-1]], shared=[[3.0, 4.0], [5.0, 6.0]])
    assert local_sum(case, declaration.profile).tolist() == [[3.0, 4.0], [5.0, 6.0]]


@PROFILES
def test_unnamed_rows_never_reach_the_result(declaration: ConsumerDeclaration) -> None:
    """NaN and Inf in rows that no entry names leave the result as it is with zeros there."""
    clean = output([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]], [[0.5]], [[1]])
    poisoned = output([[NAN, math.inf], [1.0, 2.0], [-math.inf, NAN]], [[0.5]], [[1]])
    assert bits(local_sum(poisoned, declaration.profile)) == bits(local_sum(clean, declaration.profile))


@PROFILES
def test_non_finite_values_of_a_named_row_propagate(declaration: ConsumerDeclaration) -> None:
    """NaN and Inf in a row or weight that is used reach exactly the token that uses it."""
    case = output([[NAN, math.inf], [1.0, 2.0]], [[1.0], [0.5]], [[0], [1]])
    got = local_sum(case, declaration.profile)
    assert got[0, 0].isnan() and got[0, 1] == math.inf
    assert got[1].tolist() == [1.0, 2.0]
    weighted = output([[1.0, 1.0], [1.0, 2.0]], [[NAN], [0.5]], [[0], [1]])
    got = local_sum(weighted, declaration.profile)
    assert got[0].isnan().all() and got[1].tolist() == [1.0, 2.0]


@PROFILES
def test_result_does_not_depend_on_the_number_of_rows(declaration: ConsumerDeclaration) -> None:
    """The same rows in a longer array, at other places, give the same bits (ROWS-5)."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(6, 8, generator=generator).bfloat16()
    weights = torch.randn(3, 2, generator=generator).bfloat16()
    index_map = torch.arange(6, dtype=torch.int32).view(3, 2)
    place = torch.randperm(50, generator=generator)[:6]
    longer = torch.full((50, 8), NAN, dtype=torch.bfloat16)
    longer[place] = rows
    moved = place.to(torch.int32)[index_map.long()]
    dense = local_sum(MoEOutput(UnfinalizedMoEOutput(rows, weights, index_map)), declaration.profile)
    spread = local_sum(MoEOutput(UnfinalizedMoEOutput(longer, weights, moved)), declaration.profile)
    assert bits(dense) == bits(spread)


@PROFILES
def test_rows_past_two_to_the_31_elements_are_addressed(declaration: ConsumerDeclaration) -> None:
    """Row * H past 2^31 reads the row meant (MAP-6). Only the pages of the rows named are ever touched."""
    width = 7168
    num_rows = 2**31 // width + 2
    rows = torch.empty(num_rows, width, dtype=torch.bfloat16)
    rows[num_rows - 1] = 3.0
    rows[0] = -1.0
    triple = UnfinalizedMoEOutput(
        rows, torch.ones(1, 2, dtype=torch.bfloat16), torch.tensor([[num_rows - 1, 0]], dtype=torch.int32)
    )
    assert (local_sum(MoEOutput(triple), declaration.profile) == 2.0).all()
