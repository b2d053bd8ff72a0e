"""From what a test raised to the result of its case."""

from __future__ import annotations

from typing import Any

from moe_conformance.marks import ConformanceTest
from moe_conformance.plan import Parameter
from moe_conformance.report.model import CaseResult
from moe_conformance.subjects.calls import first_line, raised_at
from moe_conformance.verdicts import (
    BackendError,
    ClauseBrokenError,
    OverClaimedError,
    UnderClaimedError,
    UnsupportedCaseError,
    VacuousCaseError,
    Verdict,
)
from moe_contract.discovery import BackendNotFoundError

_VERDICTS: tuple[tuple[type[BaseException], Verdict], ...] = (
    (UnsupportedCaseError, Verdict.UNSUPPORTED),
    (ClauseBrokenError, Verdict.FAIL),
    (OverClaimedError, Verdict.OVER_CLAIMED),
    (UnderClaimedError, Verdict.UNDER_CLAIMED),
    (VacuousCaseError, Verdict.VACUOUS),
    (BackendError, Verdict.ERROR),
    (BackendNotFoundError, Verdict.ERROR),
)


def case_result(
    node: str,
    test: ConformanceTest,
    parameter: Parameter,
    error: BaseException | None,
    headroom: float | None,
    duration_s: float,
) -> CaseResult:
    """The result of one case whose test ended with ``error``, or without one."""
    fields: dict[str, Any] = {"verdict": Verdict.PASS}
    if error is not None:
        fields = _of_error(error)
    return CaseResult(
        id=node,
        test=node.partition("[")[0],
        clause=test.clause,
        producer=parameter.producer,
        consumer=parameter.consumer,
        case=parameter.case.model_dump(mode="json"),
        case_id=parameter.case.id,
        headroom=headroom,
        duration_s=round(duration_s, 4),
        **fields,
    )


def _of_error(error: BaseException) -> dict[str, Any]:
    for kind, verdict in _VERDICTS:
        if isinstance(error, kind):
            violations = error.violations if isinstance(error, ClauseBrokenError) else ()
            return {"verdict": verdict, "reason": first_line(error), "violations": violations}
    reason = f"the suite failed: {type(error).__name__}: {first_line(error)} ({raised_at(error)})"
    return {"verdict": Verdict.ERROR, "reason": reason, "suite_error": True}
