"""Producer tests that a right-looking wrong producer could pass: a routing weight in the wrong place."""

from __future__ import annotations

import pytest

from moe_conformance.cases.case import LayerCase
from moe_conformance.direct import run_case
from moe_conformance.faults.catalogue import faults
from moe_conformance.report.model import CaseResult
from moe_conformance.suite import test_output
from moe_conformance.verdicts import Verdict
from moe_contract import Activation, Producer, RoutingMethod
from moe_contract.discovery import load_producer

CASE = LayerCase(
    tokens=1, top_k=1, hidden_size=256, ranks=1, dtype="bfloat16", intermediate_size=32, num_experts=16,
    method=RoutingMethod.LLAMA4,
)  # fmt: skip


def _finalized(case: LayerCase, producer: Producer) -> CaseResult:
    return run_case(test_output.test_finalized_output_is_the_weighted_sum, case, producer, None)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_weight_on_the_output_is_told_from_one_on_the_input(ranks: int, dtype: str, activation: Activation) -> None:
    """Of one token, in either dtype and whatever the activation, where LLAMA4's weight was applied is seen."""
    case = CASE.model_copy(update={"ranks": ranks, "dtype": dtype, "activation": activation})
    assert _finalized(case, load_producer("reference")).verdict is Verdict.PASS
    wrong = faults()["weighted-input-weighted-at-the-output"].plant().producer
    assert wrong is not None
    result = _finalized(case, wrong)
    assert (result.verdict, result.blamed) == (Verdict.FAIL, "OUT-1")
