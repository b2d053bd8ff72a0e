"""What a run consists of: every test with every case and backend that was asked for, before any runs."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict

from moe_conformance import suite
from moe_conformance.cases.case import LayerCase, TailCase
from moe_conformance.cases.layer_data import weights_key
from moe_conformance.cases.profiles import get_profile
from moe_conformance.cases.selection import select_cases
from moe_conformance.marks import ConformanceTest, Kind, metadata


class PlanRequest(BaseModel):
    """What was asked for. Backends are names or ``module:object``; empty tuples mean none of that side."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    producers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()
    profile: str = "core"
    ranks: tuple[int, ...] | None = None
    """None: the profile's own."""
    device: str = "cpu"
    clauses: tuple[str, ...] = ()
    """Empty: all."""
    seed: int = 0
    partners: tuple[str, ...] = ()
    """``producer:NAME`` or ``consumer:NAME``: backends that only take part in pairs, as partners of the other side."""


class PlannedCase(BaseModel):
    """One case that has to run. ``id`` is its pytest node id, relative to the suite's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    test: str
    """``module.py::function``."""
    clause: str
    kind: Kind
    producer: str | None = None
    consumer: str | None = None
    case: dict[str, Any]
    case_id: str


class Parameter(BaseModel):
    """What one parametrised test is handed: its case and the backends' names."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    producer: str | None
    consumer: str | None
    case: Any
    """TailCase or LayerCase."""

    @property
    def id(self) -> str:
        """Backends, then the case."""
        backends = "+".join(name for name in (self.producer, self.consumer) if name)
        return f"{backends}:{self.case.id}"


class PlanError(ValueError):
    """The suite cannot run as asked; the message is one line."""


@dataclass(frozen=True)
class SuiteTest:
    """One conformance test and what its marks say of it."""

    name: str
    """``module.py::function``."""
    function: Callable[..., Any]
    metadata: ConformanceTest


def suite_test(name: str, function: Callable[..., Any]) -> SuiteTest:
    """The function as a conformance test; raises PlanError where its marks do not give both clause and cases."""
    found = metadata(function)
    if found is None:
        raise PlanError(
            f"{name} does not say both clause and cases: mark it with @clause and @tails, @layers or @pairs"
        )
    return SuiteTest(name, function, found)


@cache
def suite_tests() -> dict[str, SuiteTest]:
    """Every conformance test by ``module.py::function``; raises PlanError for one that is not marked."""
    found: dict[str, SuiteTest] = {}
    for module_info in pkgutil.iter_modules(suite.__path__):
        if module_info.name.startswith("test_"):
            module = importlib.import_module(f"moe_conformance.suite.{module_info.name}")
            for function, value in vars(module).items():
                if function.startswith("test_") and callable(value):
                    name = f"{module_info.name}.py::{function}"
                    found[name] = suite_test(name, value)
    return found


def parameters(test: ConformanceTest, request: PlanRequest) -> list[Parameter]:
    """The parameters of one test, in the order in which inputs can be reused: case by case, backend by backend."""
    cases = select_cases(get_profile(request.profile), test, request.ranks, request.seed)
    return [Parameter(producer=p, consumer=c, case=case) for case in cases for p, c in _backends(test.kind, request)]


def inputs_key(case: LayerCase | TailCase) -> tuple[str, ...]:
    """Cases that share inputs have keys that sort next to one another: first the layer's weights, then its ranks."""
    if isinstance(case, LayerCase):
        return ("layer", weights_key(case).id, f"{case.ranks:03}", f"{case.ep:03}", case.id)
    return ("tail", case.id)


def plan(request: PlanRequest) -> list[PlannedCase]:
    """Every case that the request runs."""
    planned = []
    for test in suite_tests().values():
        if not request.clauses or test.metadata.clause in request.clauses:
            planned += [_planned(test, parameter) for parameter in parameters(test.metadata, request)]
    return planned


def _planned(test: SuiteTest, parameter: Parameter) -> PlannedCase:
    return PlannedCase(
        id=f"{test.name}[{parameter.id}]",
        test=test.name,
        clause=test.metadata.clause,
        kind=test.metadata.kind,
        producer=parameter.producer,
        consumer=parameter.consumer,
        case=parameter.case.model_dump(mode="json"),
        case_id=parameter.case.id,
    )


def _backends(kind: Kind, request: PlanRequest) -> Iterator[tuple[str | None, str | None]]:
    if kind == "producer":
        yield from ((name, None) for name in request.producers if f"producer:{name}" not in request.partners)
    elif kind == "consumer":
        yield from ((None, name) for name in request.consumers if f"consumer:{name}" not in request.partners)
    else:
        yield from ((p, c) for p in request.producers for c in request.consumers)
