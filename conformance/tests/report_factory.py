"""Results and reports made by hand, for the tests of what is made from them."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from moe_conformance.cases.case import kind_of
from moe_conformance.report.model import BackendRecord, CaseResult, Environment, Report, Selection
from moe_conformance.report.terminal import print_report
from moe_conformance.verdicts import Verdict
from moe_contract import Violation

ENVIRONMENT = Environment(
    suite_version="0.1.0", contract_version="1.1", python="3.11", torch="2.9", platform="Linux", device="cpu"
)
NARROW = 80
"""Columns of a terminal, unless a test asks for others."""
SHAPE = {"tokens": 17, "top_k": 8, "hidden_size": 2048, "ranks": 2, "dtype": "bfloat16"}
ABSENT = Violation(
    clause="MAP-4",
    field="residual_out",
    got="3.5",
    expected="2",
    bound=0.0078,
    hint="slot 5 is -1: the last row was read as this slot's row",
    rank=1,
    token=16,
    column=40,
)


def result(clause: str = "MAP-4", verdict: Verdict = Verdict.PASS, number: int = 0, **fields: Any) -> CaseResult:
    """One result of consumer ``acme-tail``, unless ``fields`` say otherwise; ``case``: what differs from SHAPE."""
    parameters = {**SHAPE, "seed": number, **fields.pop("case", {})}
    case = kind_of(parameters).model_validate(parameters)
    backends = {"producer": fields.pop("producer", None), "consumer": fields.pop("consumer", "acme-tail")}
    test = fields.pop("test", f"test_{clause.lower().replace('-', '_')}.py::test_promise")
    names = "+".join(name for name in backends.values() if name)
    known = {"id": f"{test}[{names}:{case.id}]", "test": test, "clause": clause, "case_id": case.id, **backends}
    return CaseResult(**{**known, "case": case.model_dump(mode="json"), "verdict": verdict, **fields})


def failure(clause: str = "MAP-4", violation: Violation = ABSENT, number: int = 0, **fields: Any) -> CaseResult:
    """A failed case of ``clause`` that is blamed on the violation's clause."""
    reason = fields.pop("reason", str(violation))
    return result(clause, Verdict.FAIL, number, violations=(violation,), reason=reason, **fields)


def report_of(*cases: CaseResult, **fields: Any) -> Report:
    """A report of these cases."""
    selection = Selection(profile="smoke", producers=(), consumers=("acme-tail",), ranks=(1, 2))
    known: dict[str, Any] = {
        "complete": True,
        "started": "2026-01-01T00:00:00+00:00",
        "duration_s": 1.5,
        "selection": selection,
        "environment": ENVIRONMENT,
        "backends": (BackendRecord(name="acme-tail", side="consumer"),),
        "manifest": tuple(case.id for case in cases),
        "cases": cases,
    }
    return Report(**{**known, **fields})


def printed(report: Report, *, width: int = NARROW, verbosity: int = 0) -> str:
    """The terminal view as text."""
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    print_report(report, console, verbosity=verbosity)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()
