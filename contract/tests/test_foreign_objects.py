"""Objects of another project pass and fail exactly as the contract's own do: only attributes count."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moe_contract import (
    UnfinalizedMoEOutput,
    complete,
    complete_expert_parallel,
    finalize,
    is_unfinalized,
)
from moe_contract.checks import check

from .lattice import H, K, T, assert_bitwise, exact_sum, expectation, lattice, triple


@dataclass
class TheirTriple:
    """Another project's dataclass: contract 1.0, without route_major."""

    gemm2_permuted: Tensor
    expert_weights: Tensor
    expanded_idx_to_permuted_idx: Tensor


@dataclass
class TheirOutput:
    """Another project's layer output."""

    routed: object
    shared_output: Tensor | None = None
    routed_scaling_factor: float = 1.0


TheirTuple = namedtuple("TheirTuple", ["gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx"])


class TheirSlots:
    """The fields as slots and a property, without a __dict__."""

    __slots__ = ("_map", "expert_weights", "gemm2_permuted")

    def __init__(self, rows: Tensor, weights: Tensor, mapped: Tensor) -> None:
        self.gemm2_permuted, self.expert_weights, self._map = rows, weights, mapped

    @property
    def expanded_idx_to_permuted_idx(self) -> Tensor:
        """The map."""
        return self._map


def namespace(rows: Tensor, weights: Tensor, mapped: Tensor) -> SimpleNamespace:
    """The fields and nothing else."""
    return SimpleNamespace(gemm2_permuted=rows, expert_weights=weights, expanded_idx_to_permuted_idx=mapped)


FOREIGN = [TheirTriple, TheirTuple, TheirSlots, namespace]
Maker = Callable[[Tensor, Tensor, Tensor], object]


def as_foreign(make: Maker, output: UnfinalizedMoEOutput) -> object:
    """The same three tensors in another project's object."""
    return make(output.gemm2_permuted, output.expert_weights, output.expanded_idx_to_permuted_idx)


@pytest.mark.parametrize("make", FOREIGN)
@pytest.mark.parametrize("wrap", [lambda routed: routed, TheirOutput, lambda r: SimpleNamespace(routed=r)])
def test_correct_foreign_object_passes(make: Maker, wrap: Callable[[object], object]) -> None:
    """No class of ours, no route_major, no scale field: all have defaults."""
    output = as_foreign(make, triple())
    assert is_unfinalized(output)
    assert check(wrap(output), expectation(deferred=True)) == []


@pytest.mark.parametrize("make", FOREIGN)
@pytest.mark.parametrize(
    ("changes", "clause"),
    [
        ({"gemm2_permuted": lattice(20, 2 * H)}, "ROWS-4"),
        ({"expert_weights": torch.full((T, K), float("nan"), dtype=torch.bfloat16)}, "WGT-3"),
        ({"expanded_idx_to_permuted_idx": torch.zeros(T, K, dtype=torch.int32)}, "MAP-3"),
        ({"expanded_idx_to_permuted_idx": torch.full((T, K), 20, dtype=torch.int32)}, "MAP-2"),
        ({"expanded_idx_to_permuted_idx": torch.zeros(T * K, dtype=torch.int32)}, "MAP-1"),
    ],
)
def test_spoiled_foreign_object_fails_alike(make: Maker, changes: dict[str, Tensor], clause: str) -> None:
    """A foreign object gets word for word the violations of our own."""
    own = replace(triple(), **changes)
    violations = check(TheirOutput(as_foreign(make, own)), expectation())
    assert violations == check(own, expectation())
    assert [violation.clause for violation in violations] == [clause]


@pytest.mark.parametrize("field", ["gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx"])
def test_missing_attribute_is_a_violation(field: str) -> None:
    """An object with some of the fields is told which one it lacks."""
    output = as_foreign(namespace, triple())
    delattr(output, field)
    (violation,) = check(output, expectation())
    assert (violation.clause, violation.field) == ("OUT-1", field)
    assert violation.got == "no such attribute on SimpleNamespace"


def test_attribute_that_raises_is_a_violation() -> None:
    """A property that fails is an attribute that is not there."""

    class Broken(TheirSlots):
        """Its map cannot be read."""

        @property
        def expanded_idx_to_permuted_idx(self) -> Tensor:
            """Fails."""
            raise RuntimeError("freed")

    good = triple()
    broken = Broken(good.gemm2_permuted, good.expert_weights, good.expanded_idx_to_permuted_idx)
    assert [violation.clause for violation in check(broken, expectation())] == ["OUT-1"]


@pytest.mark.parametrize("make", FOREIGN)
def test_foreign_object_can_be_completed(make: Maker) -> None:
    """The reference completion takes them too, with their shared output and scale."""
    output, shared = as_foreign(make, triple()), lattice(T, H, seed=4)
    assert_bitwise(finalize(output), exact_sum(triple()))
    exact = exact_sum(triple(), 2.0, shared)
    assert_bitwise(complete(TheirOutput(output, shared, 2.0)), exact)
    assert_bitwise(complete(SimpleNamespace(routed=output)), exact_sum(triple()))
    both = [output, TheirOutput(output)]
    assert_bitwise(complete_expert_parallel(both), 2 * exact_sum(triple()))
