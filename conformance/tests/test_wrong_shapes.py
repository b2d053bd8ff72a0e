"""A plug-in that does not keep the protocol at all is at fault, never the suite, and is told where it is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from moe_conformance.direct import run_direct
from moe_conformance.plan import PlanRequest
from moe_conformance.report.model import CaseResult
from moe_conformance.verdicts import Verdict
from moe_contract import ConsumerDeclaration, consumer
from moe_contract.discovery import load_consumer, load_producer

from .wrong_shapes import RAISING, SIGNATURES, consumers, producers

REFERENCE = "reference"


def results(consumer: Any = None, producer: Any = None) -> list[CaseResult]:
    """Every case at two ranks of one side, and of its pairs with the reference."""
    request = PlanRequest(
        consumers=("shaped" if consumer else REFERENCE,),
        producers=("shaped" if producer else REFERENCE,),
        partners=(f"{'producer' if consumer else 'consumer'}:{REFERENCE}",),
        profile="smoke",
        ranks=(2,),
    )
    producer, consumer = producer or load_producer(REFERENCE), consumer or load_consumer(REFERENCE)
    return list(run_direct(request, producer=producer, consumer=consumer))


def _require_blame(found: list[CaseResult], name: str, side: str) -> None:
    suite = [f"{case.id}: {case.reason}" for case in found if case.suite_error]
    assert not suite, suite
    broken = [case for case in found if case.broken]
    assert broken
    for case in broken:
        assert "\n" not in case.reason and not case.reason.startswith(REFERENCE), case
    if name not in SIGNATURES and name not in RAISING:
        return
    ran = [case for case in broken if case.verdict is Verdict.ERROR]
    assert len({case.reason for case in ran}) == 1 and ran == broken, {case.reason for case in ran}
    assert "wrong_shapes.py:" in ran[0].reason, ran[0].reason
    tested = {case.clause for case in found if case.consumer == "shaped" or case.producer == "shaped"}
    assert ({"RED-6", "RED-4", "CAP-2"} if side == "consumer" else {"CAP-2", "DEFER-2"}) <= tested


@pytest.mark.parametrize(
    ("name", "wrong"), list(consumers()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_consumer_that_does_not_keep_the_protocol_is_its_own_error(name: str, wrong: Any) -> None:
    """Wrong signatures and wrong results end every case with one line of the plug-in's, in RED-6 as elsewhere."""
    _require_blame(results(consumer=wrong), name, "consumer")


@pytest.mark.parametrize(
    ("name", "wrong"), list(producers()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_producer_that_does_not_keep_the_protocol_is_its_own_error(name: str, wrong: Any) -> None:
    """The consumer that it is paired with is not blamed for what it was handed."""
    _require_blame(results(producer=wrong), name, "producer")


def test_function_that_raises_is_placed_in_its_own_file() -> None:
    """Not in the decorator that called it, nor in the library that it called."""

    @consumer(name="shaped")
    def tail(group: Any, output: Any, residual: Any, norm_weight: Any, *, eps: float, weight_bias: float) -> Any:
        return residual.reshape(7, 11, 13), residual

    found = {case.reason.rpartition(" ")[2].partition(":")[0] for case in results(consumer=tail) if case.broken}
    assert found == {"(test_wrong_shapes.py"}


def test_signature_of_a_tail_that_cannot_be_known_is_taken() -> None:
    """A tail whose call takes anything is judged by calling it."""

    class Open:
        declaration = ConsumerDeclaration(name="shaped", weights_dtypes={"activation", "float32"}, route_major=True)

        def open(self, group: Any, capacity: Any) -> Any:
            inner = load_consumer(REFERENCE).open(group, capacity)

            class Anything:
                def __call__(self, *arguments: Any, **options: Any) -> Any:
                    return inner(*arguments, **options)

                close = inner.close

            return Anything()

    assert {case.verdict for case in results(consumer=Open())} <= {Verdict.PASS, Verdict.UNSUPPORTED}
