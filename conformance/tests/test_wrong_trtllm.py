"""Every error planted in the TRTLLM adapters is caught by the clause that it breaks; the adapters themselves pass."""

from __future__ import annotations

from collections import Counter

import pytest

from moe_conformance.cases.case import LayerCase
from moe_conformance.direct import run_case, run_direct
from moe_conformance.plan import PlanRequest
from moe_conformance.suite import test_numerics, test_scale, test_weights
from moe_conformance.verdicts import Verdict
from moe_contract import Producer, RoutingMethod
from moe_contract.declarations import Determinism
from moe_contract.discovery import load_producer

from .wrong_trtllm import WRONG_TRTLLM, bf16, nvfp4

BASE = {"tokens": 5, "hidden_size": 256, "dtype": "bfloat16", "intermediate_size": 32, "num_experts": 16}
MODULAR = "moe_backends.trtllm:bf16_modular_emulated"


def _verdicts(producer: Producer, clause: str) -> Counter[tuple[Verdict, str | None]]:
    request = PlanRequest(producers=("wrong",), profile="smoke", clauses=(clause,))
    return Counter((result.verdict, result.blamed) for result in run_direct(request, producer=producer))


@pytest.mark.parametrize("name", WRONG_TRTLLM)
def test_planted_error_is_caught_by_its_clause(name: str) -> None:
    """The clause's own tests fail and blame it, and nothing crashes."""
    producer, clause = WRONG_TRTLLM[name]
    verdicts = _verdicts(producer, clause)
    assert verdicts[Verdict.FAIL, clause], verdicts
    broken = {verdict for verdict, _ in verdicts} - {Verdict.PASS, Verdict.UNSUPPORTED, Verdict.FAIL}
    assert not broken, verdicts


@pytest.mark.parametrize("clause", sorted({clause for _, clause in WRONG_TRTLLM.values()}))
@pytest.mark.parametrize("make", [bf16, nvfp4])
def test_adapters_without_the_error_keep_the_clause(make: object, clause: str) -> None:
    """What the errors are planted in passes the clause's tests, and some of them run."""
    verdicts = _verdicts(make(), clause)  # type: ignore[operator]  # one of two functions
    assert {verdict for verdict, _ in verdicts} <= {Verdict.PASS, Verdict.UNSUPPORTED}, verdicts
    assert verdicts[Verdict.PASS, clause], verdicts


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("method", [method for method in RoutingMethod if method is not RoutingMethod.LLAMA4])
@pytest.mark.parametrize("make", [bf16, nvfp4])
def test_every_routing_method_at_every_size(make: object, method: RoutingMethod, ranks: int) -> None:
    """Weights, folding and rows of each method, over 2, 4 and 8 ranks and in two expert-parallel halves."""
    producer = make()  # type: ignore[operator]  # one of two functions
    for top_k, ep in ((3, 1), (8, 2)):
        case = LayerCase(**BASE, top_k=top_k, ranks=ranks, ep=ep, method=method, scale=2.5)
        for test in (
            test_weights.test_weights_decode_to_the_routing_weights,
            test_scale.test_folding_is_as_declared_for_each_method,
            test_numerics.test_rows_are_within_the_bound_of_a_float32_kernel,
        ):
            result = run_case(test, case, producer, None)
            assert result.verdict is Verdict.PASS, (result.reason, case.id)


@pytest.mark.parametrize("weights", ["activation", "float32"])
def test_modular_form_keeps_float32_weights(weights: str) -> None:
    """Ids and weights handed over as two tensors come back as float32, verbatim."""
    case = LayerCase(**BASE, top_k=3, ranks=2, method=RoutingMethod.PRECOMPUTED, precomputed_weights=weights)
    result = run_case(test_weights.test_weights_decode_to_the_routing_weights, case, load_producer(MODULAR), None)
    assert result.verdict is Verdict.PASS, result.reason


@pytest.mark.parametrize("make", [bf16, nvfp4])
def test_lattice_layers_hold_tightly(make: object) -> None:
    """On small integers the derived bound of a quantised producer certifies, since no code is near another."""
    case = LayerCase(**BASE, top_k=3, ranks=2, stratum="lattice", activation="relu2")
    producer = make()  # type: ignore[operator]  # one of two functions
    result = run_case(test_numerics.test_rows_of_small_integers_are_exact, case, producer, None)
    assert result.verdict is Verdict.PASS, result.reason
    assert producer.declaration.determinism is Determinism.BITWISE
