"""The pytest plugin: options, parametrisation of the conformance tests, and a verdict for every outcome."""

from __future__ import annotations

import faulthandler
import time
from collections.abc import Generator
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from moe_conformance.time_limits import CASE_TIMEOUT_S

if TYPE_CHECKING:
    from moe_conformance.marks import ConformanceTest
    from moe_conformance.plan import Parameter, PlanRequest
    from moe_conformance.report.model import CaseResult

PROPERTY = "moe_case"
"""Name of the user property that carries a case's result, as JSON, from a worker to the controller."""
WATCHDOG_FACTOR = 3.0
"""A case that outlives its time limit this many times holds the interpreter itself: its worker process is ended."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of a conformance run; ``moe-conformance run`` passes them on."""
    group = parser.getgroup("moe-conformance", "MoE output contract conformance")
    group.addoption(
        "--moe-producer", action="append", default=[], metavar="NAME", help="producer: name or module:object"
    )
    group.addoption(
        "--moe-consumer", action="append", default=[], metavar="NAME", help="consumer: name or module:object"
    )
    group.addoption("--moe-partner", action="append", default=[], metavar="SIDE:NAME", help="takes part in pairs only")
    group.addoption("--moe-profile", default="smoke", metavar="NAME", help="smoke, core, full or model:NAME")
    group.addoption("--moe-tp", default="", metavar="1,2,4", help="tensor-parallel sizes; default: the profile's")
    group.addoption("--moe-device", default="cpu", choices=("cpu", "cuda"), help="where the backends run")
    group.addoption("--moe-clause", action="append", default=[], metavar="ID", help="only tests of this clause")
    group.addoption("--moe-seed", type=int, default=0, metavar="N", help="seed of all inputs")
    group.addoption("--moe-timeout", type=float, default=CASE_TIMEOUT_S, metavar="S", help="seconds one case may take")


def pytest_configure(config: pytest.Config) -> None:
    """One thread per worker process: several workers that each start a thread per core slow one another down."""
    if hasattr(config, "workerinput"):
        import torch

        torch.set_num_threads(1)


def request_of(config: pytest.Config) -> PlanRequest:
    """The plan that the options ask for."""
    from moe_conformance.plan import PlanRequest

    sizes = config.getoption("--moe-tp")
    return PlanRequest(
        producers=tuple(config.getoption("--moe-producer")),
        consumers=tuple(config.getoption("--moe-consumer")),
        partners=tuple(config.getoption("--moe-partner")),
        profile=config.getoption("--moe-profile"),
        ranks=tuple(int(size) for size in sizes.split(",")) if sizes else None,
        device=config.getoption("--moe-device"),
        clauses=tuple(clause.upper() for clause in config.getoption("--moe-clause")),
        seed=config.getoption("--moe-seed"),
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Lays each conformance test over the cases and backends of the plan."""
    test = _metadata(metafunc.function)
    if test is None:
        return
    from moe_conformance.marks import FIXTURE
    from moe_conformance.plan import parameters

    request = request_of(metafunc.config)
    wanted = not request.clauses or test.clause in request.clauses
    values = parameters(test, request) if wanted else []
    metafunc.parametrize(FIXTURE[test.kind], values, ids=[value.id for value in values], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops the placeholders that pytest makes for tests without a case; puts cases of the same inputs together."""
    kept = [item for item in items if _test_of(item) is None or _parameter(item) is not None]
    dropped = [item for item in items if item not in set(kept)]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    # Weights, rows and truths are made once for cases that share them, if these run one after the other.
    items[:] = sorted(kept, key=_inputs_key)


def _inputs_key(item: pytest.Item) -> tuple[str, ...]:
    parameter = _parameter(item)
    if parameter is None:
        return ()
    from moe_conformance.plan import inputs_key

    return inputs_key(parameter.case)


@cache
def _backend(name: str, side: str) -> Any:
    from moe_contract.discovery import load_consumer, load_producer

    return load_producer(name) if side == "producer" else load_consumer(name)


def _subject(request: pytest.FixtureRequest) -> Any:
    from moe_conformance.subjects.calls import Settings
    from moe_conformance.subjects.make import Sides, make_subject

    parameter: Parameter = request.param
    test = _metadata(request.function)
    assert test is not None
    sides = Sides(
        producer=_backend(parameter.producer, "producer") if parameter.producer else None,
        consumer=_backend(parameter.consumer, "consumer") if parameter.consumer else None,
    )
    settings = Settings(request.config.getoption("--moe-device"), request.config.getoption("--moe-timeout"))
    return make_subject(parameter, sides, test.clause, settings)


@pytest.fixture
def tail(request: pytest.FixtureRequest) -> Any:
    """A consumer with one case."""
    return _subject(request)


@pytest.fixture
def layer(request: pytest.FixtureRequest) -> Any:
    """A producer with one case."""
    return _subject(request)


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Any:
    """A producer and a consumer with one case."""
    return _subject(request)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends the worker process when a case holds the interpreter, so that the other cases still run."""
    if _test_of(item) is None or not hasattr(item.config, "workerinput"):
        return (yield)
    limit = WATCHDOG_FACTOR * item.config.getoption("--moe-timeout")
    faulthandler.dump_traceback_later(limit, exit=True, file=2)  # a backend may have closed or replaced sys.stderr
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attaches the verdict of a conformance test to its report."""
    report = yield
    ended = call.when == "call" or (call.when == "setup" and call.excinfo is not None)
    if ended and _test_of(item) is not None and _parameter(item) is not None:
        result = _result(item, call)
        report.user_properties.append((PROPERTY, result.model_dump_json()))
        if report.failed and report.longrepr is not None:
            # A message with a lone surrogate could not be sent to the controller, and would end the run.
            report.longrepr = str(report.longrepr).encode("utf-8", "backslashreplace").decode("utf-8")
        if result.verdict.value == "unsupported":
            report.outcome = "skipped"
            report.longrepr = (str(item.path), 0, f"unsupported: {result.reason}")
        elif result.violations:
            report.longrepr = "\n".join(str(violation) for violation in result.violations)
    return report


def _result(item: pytest.Item, call: pytest.CallInfo[None]) -> CaseResult:
    from moe_conformance.marks import FIXTURE
    from moe_conformance.outcome import case_result

    test, parameter = _test_of(item), _parameter(item)
    assert test is not None and parameter is not None
    subject = getattr(item, "funcargs", {}).get(FIXTURE[test.kind])
    error = call.excinfo.value if call.excinfo is not None else None
    headroom = getattr(subject, "headroom", None) if subject is not None else None
    nodeid = item.nodeid.rpartition("/")[2] if "/" in item.nodeid.partition("::")[0] else item.nodeid
    return case_result(nodeid, test, parameter, error, headroom, time.time() - call.start)


def _metadata(function: Any) -> ConformanceTest | None:
    if not hasattr(function, "moe_conformance_test"):
        return None  # any other project's test: nothing of the suite is imported for it
    from moe_conformance.marks import metadata

    return metadata(function)


def _test_of(item: pytest.Item) -> ConformanceTest | None:
    return _metadata(getattr(item, "function", None))


def _parameter(item: pytest.Item) -> Parameter | None:
    from moe_conformance.marks import FIXTURE

    test = _test_of(item)
    callspec = getattr(item, "callspec", None)
    if test is None or callspec is None:
        return None
    value = callspec.params.get(FIXTURE[test.kind])
    return value if hasattr(value, "case") else None
