"""A layer that cannot be split evenly over the ranks is unsupported, and a pair's headroom is that of both sides."""

from __future__ import annotations

from typing import Any

import pytest

from moe_conformance.cases.case import LayerCase
from moe_conformance.direct import run_case
from moe_conformance.plan import PlanRequest, parameters, suite_tests
from moe_conformance.subjects.calls import Settings
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.subjects.pair import PairSubject
from moe_conformance.suite import test_numerics
from moe_conformance.verdicts import Verdict
from moe_contract.discovery import load_consumer, load_producer


def _case(**differences: Any) -> LayerCase:
    fields = {"tokens": 2, "top_k": 2, "hidden_size": 256, "ranks": 2, "dtype": "bfloat16"}
    return LayerCase(**{**fields, "intermediate_size": 32, "num_experts": 16, **differences})


@pytest.mark.parametrize(
    ("differences", "reason"),
    [
        ({"ranks": 3}, "intermediate size 32 over 3 tensor-parallel ranks"),
        ({"ranks": 64}, "intermediate size 32 over 64 tensor-parallel ranks"),
        ({"ranks": 3, "ep": 2}, "3 ranks cannot be split into 2 expert-parallel groups"),
        ({"ranks": 3, "ep": 3}, "16 experts over 3 expert-parallel ranks"),
        ({"ranks": 4, "shared_intermediate_size": 6}, "shared intermediate size 6 over 4 tensor-parallel ranks"),
    ],
)
def test_layer_without_equal_parts_is_unsupported(differences: dict[str, Any], reason: str) -> None:
    """With the reason, in a pair as with the producer alone."""
    producer, consumer = load_producer("reference"), load_consumer("reference")
    rows, pair = (
        test_numerics.test_rows_are_within_the_bound_of_a_float32_kernel,
        test_numerics.test_layer_and_tail_together_are_within_the_bound,
    )
    for function, other in ((rows, None), (pair, consumer)):
        result = run_case(function, _case(**differences), producer, other)
        assert result.verdict is Verdict.UNSUPPORTED
        assert reason in result.reason


def test_no_layer_test_fails_where_there_are_no_parts() -> None:
    """Every test of a producer or a pair says unsupported at three ranks, whichever of the layer it asks for first."""
    producer, consumer = load_producer("reference"), load_consumer("reference")
    request = PlanRequest(producers=("reference",), consumers=("reference",), profile="smoke", ranks=(3,))
    for test in suite_tests().values():
        kind = test.metadata.kind
        for parameter in parameters(test.metadata, request) if kind != "consumer" else ():
            result = run_case(test.function, parameter.case, producer, consumer if kind == "pair" else None)
            assert result.verdict in (Verdict.UNSUPPORTED, Verdict.PASS), f"{result.id}: {result.reason}"


def test_headroom_of_a_pair_is_the_larger_of_its_sides() -> None:
    """Neither side's is lost; before anything is judged there is none."""
    layer = LayerSubject("reference", load_producer("reference"), _case(), "NUM-1")
    pair = PairSubject(layer, "reference", load_consumer("reference"), layer.case, "NUM-1", Settings())
    assert pair.headroom is None
    layer.headroom = 0.75
    assert pair.headroom == 0.75
    pair.tail.headroom = 0.5
    assert pair.headroom == 0.75
    pair.tail.headroom = 0.875
    assert pair.headroom == 0.875
