"""What is judged by value in the suite's own steps: the right value passes, and nothing else does, NaN included."""

from __future__ import annotations

import math

import pytest
import torch

from moe_conformance.cases import LayerCase
from moe_conformance.oracle import Truth
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.suite.steps import require_within
from moe_conformance.verdicts import ClauseBrokenError
from moe_contract.discovery import load_producer

LAYER_CASE = LayerCase(
    tokens=2, top_k=2, hidden_size=64, ranks=1, dtype="bfloat16", intermediate_size=16, num_experts=8
)
TRUTH = Truth(torch.ones(2, 64, dtype=torch.float64), torch.full((2, 64), 0.01, dtype=torch.float64))


def _layer() -> LayerSubject:
    return LayerSubject("reference", load_producer("reference"), LAYER_CASE, "SHARED-1")


def test_value_within_its_bound_is_accepted() -> None:
    """Half a bound away is right, and recorded as a headroom of a half."""
    layer = _layer()
    require_within(layer, torch.full((2, 64), 1.005), TRUTH, "SHARED-1", "shared_output", 0)
    assert layer.headroom == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1.02])
def test_value_out_of_its_bound_is_named_with_its_place(wrong: float) -> None:
    """NaN, which no comparison calls too large, is a violation like any other wrong number."""
    got = torch.ones(2, 64)
    got[1, 7] = wrong
    layer = _layer()
    with pytest.raises(ClauseBrokenError) as caught:
        require_within(layer, got, TRUTH, "SHARED-1", "shared_output", 3)
    violation = caught.value.violations[0]
    assert (violation.clause, violation.rank, violation.token, violation.column) == ("SHARED-1", 3, 1, 7)
    assert layer.headroom is not None and layer.headroom > 1.0
