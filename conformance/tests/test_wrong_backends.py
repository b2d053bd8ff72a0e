"""The suite can fail: every wrong backend is caught, and only the clause that it breaks is blamed."""

from __future__ import annotations

from collections import Counter

import pytest

from moe_conformance.direct import run_direct
from moe_conformance.plan import PlanRequest
from moe_conformance.report.explain import explain_failures
from moe_conformance.verdicts import Verdict

from .wrong_consumers import WRONG_CONSUMERS, PlainConsumer, PlainTail
from .wrong_producers import WRONG_PRODUCERS


def _blamed(**run: object) -> Counter[str]:
    """Clauses blamed by the smoke profile, with the number of failures each."""
    side = "producers" if "producer" in run else "consumers"
    request = PlanRequest(**{side: ("wrong",)}, profile="smoke")
    results = explain_failures(run_direct(request, **run))  # type: ignore[arg-type]  # one backend, of the side named
    assert not [result for result in results if result.suite_error], "the suite itself failed"
    crashes = [f"{r.id}: {r.reason}" for r in results if r.verdict in (Verdict.ERROR, Verdict.VACUOUS)]
    assert not crashes, crashes
    return Counter(result.blamed for result in results if result.verdict is Verdict.FAIL)


def test_plain_consumer_keeps_every_clause() -> None:
    """The correct tail that the wrong ones are made from is not blamed for anything."""
    assert not _blamed(consumer=PlainConsumer(PlainTail))


@pytest.mark.parametrize("tail", WRONG_CONSUMERS, ids=lambda tail: tail.__name__)
def test_wrong_consumer_is_blamed_for_its_own_clause(tail: type[PlainTail]) -> None:
    """A consumer that is wrong in one line fails, and only with the clause that the line breaks."""
    assert set(_blamed(consumer=PlainConsumer(tail))) == {WRONG_CONSUMERS[tail]}


@pytest.mark.parametrize("name", WRONG_PRODUCERS)
def test_wrong_producer_is_blamed_for_its_own_clause(name: str) -> None:
    """A producer that is wrong in one way fails, and only with the clause that it breaks."""
    producer, clause = WRONG_PRODUCERS[name]
    assert set(_blamed(producer=producer)) == {clause}
