"""Running conformance tests on backend objects in this process, without pytest: for tests of the suite itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from moe_conformance.outcome import case_result
from moe_conformance.plan import Parameter, PlanRequest, SuiteTest, parameters, suite_test, suite_tests
from moe_conformance.report.model import CaseResult
from moe_conformance.subjects.calls import Settings
from moe_conformance.subjects.make import Sides, make_subject
from moe_contract import Consumer, Producer


def run_direct(
    request: PlanRequest,
    producer: Producer | None = None,
    consumer: Consumer | None = None,
    *,
    settings: Settings | None = None,
) -> Iterator[CaseResult]:
    """The result of every case of the request, one by one, with these objects in place of named backends.

    The request's ``producers`` and ``consumers`` only give the names that results carry.
    """
    for test in suite_tests().values():
        if request.clauses and test.metadata.clause not in request.clauses:
            continue
        for parameter in parameters(test.metadata, request):
            sides = Sides(producer if parameter.producer else None, consumer if parameter.consumer else None)
            yield _run_one(test, parameter, sides, settings or Settings())


def run_case(
    function: Callable[..., Any],
    case: Any,
    producer: Producer | None,
    consumer: Consumer | None,
    *,
    settings: Settings | None = None,
) -> CaseResult:
    """The result of one conformance test, by its function, on one case that no profile need contain."""
    names = (producer.declaration.name if producer else None, consumer.declaration.name if consumer else None)
    parameter = Parameter(producer=names[0], consumer=names[1], case=case)
    test = suite_test(function.__name__, function)
    return _run_one(test, parameter, Sides(producer, consumer), settings or Settings())


def _run_one(test: SuiteTest, parameter: Parameter, sides: Sides, settings: Settings) -> CaseResult:
    subject = make_subject(parameter, sides, test.metadata.clause, settings)
    started = time.perf_counter()
    error: BaseException | None = None
    try:
        test.function(subject)
    except Exception as raised:
        error = raised
    name, seconds = f"{test.name}[{parameter.id}]", time.perf_counter() - started
    return case_result(name, test.metadata, parameter, error, subject.headroom, seconds)
