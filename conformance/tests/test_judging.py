"""What is judged by value in the suite's own steps: the right value passes, and nothing else does, NaN included."""

from __future__ import annotations

import math

import pytest
import torch

from moe_conformance.cases.case import LayerCase
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.suite.comparisons import require_within
from moe_conformance.suite.deferral import judge_rows
from moe_conformance.verdicts import ClauseBrokenError
from moe_contract import Activation, UnfinalizedMoEOutput
from moe_contract.discovery import load_producer

LAYER_CASE = LayerCase(
    tokens=2, top_k=2, hidden_size=64, ranks=1, dtype="bfloat16", intermediate_size=16, num_experts=8
)
VALUE = torch.ones(2, 64, dtype=torch.float64)
BOUND = torch.full((2, 64), 0.01, dtype=torch.float64)


def _layer() -> LayerSubject:
    return LayerSubject("reference", load_producer("reference"), LAYER_CASE, "SHARED-1")


def _require(layer: LayerSubject, got: torch.Tensor) -> None:
    require_within(got, VALUE, BOUND, clause="SHARED-1", field="shared_output", rank=3, layer=layer)


def test_value_within_its_bound_is_accepted() -> None:
    """Half a bound away is right, and recorded as a headroom of a half."""
    layer = _layer()
    _require(layer, torch.full((2, 64), 1.005))
    assert layer.headroom == pytest.approx(0.5, abs=1e-4)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1.02])
def test_value_out_of_its_bound_is_named_with_its_place(wrong: float) -> None:
    """NaN, which no comparison calls too large, is a violation like any other wrong number."""
    got = torch.ones(2, 64)
    got[1, 7] = wrong
    layer = _layer()
    with pytest.raises(ClauseBrokenError) as caught:
        _require(layer, got)
    violation = caught.value.violations[0]
    assert (violation.clause, violation.rank, violation.token, violation.column) == ("SHARED-1", 3, 1, 7)
    assert layer.headroom is not None and layer.headroom > 1.0


def test_row_of_small_integers_has_to_be_equal() -> None:
    """One unit in the last place of one element, which a bound may grant, is a NUM-1 failure."""
    fields = {
        "ranks": 2,
        "activation": Activation.RELU2,
        "stratum": "lattice",
        "hidden_size": 256,
        "intermediate_size": 32,
    }
    case = LAYER_CASE.model_copy(update=fields)
    layer = LayerSubject("reference", load_producer("reference"), case, "NUM-1")
    outputs = layer.run()
    judge_rows(layer, outputs)
    first = outputs[0]
    assert isinstance(first, UnfinalizedMoEOutput)
    row = int(first.expanded_idx_to_permuted_idx[0, 0])
    bits = first.gemm2_permuted.view(torch.int16)
    column = int(first.gemm2_permuted[row].abs().argmax())
    bits[row, column] += 1
    with pytest.raises(ClauseBrokenError, match=r"NUM-1.*bound 0"):
        judge_rows(layer, outputs)
