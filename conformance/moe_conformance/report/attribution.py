"""Failures of composite tests that a clause broken elsewhere accounts for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from moe_conformance.report.model import CaseResult
from moe_conformance.verdicts import Verdict

COMPOSITE = frozenset({"NUM-1", "NUM-2", "DEFER-5", "DEFER-6", "RED-5"})
"""Clauses whose tests put everything together, so that one broken rule breaks them too."""
BUILDS_ON = {
    "NORM-2": "NORM-1",
    "RED-2": "RED-1",
    "MAP-4": "ROWS-2",
    "SHARED-2": "SHARED-1",
    # When it defers at all is asked after whether it defers what it says it does.
    "DEFER-1": "DEFER-3",
}
"""A clause whose tests cannot hold where another, that they build on, is broken."""
ROWS = "gemm2_permuted"
UNNAMED = frozenset({"residual_out", ROWS})
"""Results that each test judges whole, so that a wrong value alone says little about its cause."""
Case = Mapping[str, Any]
FEATURES: Mapping[str, Callable[[Case], bool]] = {
    "MAP-4": lambda case: case.get("absent", "none") != "none",
    "SCALE-1": lambda case: case.get("scale", 1.0) != 1.0,
    "SCALE-2": lambda case: case.get("scale", 1.0) != 1.0,
    "SHARED-1": lambda case: bool(case.get("shared") or case.get("shared_intermediate_size")),
    "SHARED-2": lambda case: bool(case.get("shared") or case.get("shared_intermediate_size")),
    "RED-1": lambda case: case.get("ranks", 1) > 1,
    "RED-2": lambda case: case.get("ranks", 1) > 1,
    "WGT-2": lambda case: "float32" in (case.get("weights_dtype"), case.get("precomputed_weights")),
    "NORM-2": lambda case: bool(case.get("weight_bias")),
    "OUT-1": lambda case: case.get("form") == "finalized",
    "OUT-2": lambda case: case.get("tokens") == 0,
    "QUANT-1": lambda case: bool(case.get("quant")),
    "ROWS-6": lambda case: bool(case.get("biases")),
    "ROWS-5": lambda case: bool(case.get("skew")),
    "MAP-5": lambda case: case.get("ep", 1) > 1,
}
"""Clause: whether a case has what the clause is about. The first that fits is blamed."""


def explain_failures(cases: Iterable[CaseResult]) -> tuple[CaseResult, ...]:
    """The same results, with ``explained_by`` where a clause that the backend breaks elsewhere accounts for one."""
    results = tuple(cases)
    broken = {
        (backend, case.clause)
        for case in results
        if case.verdict is Verdict.FAIL and case.clause not in COMPOSITE and case.blamed == case.clause
        for backend in _backends(case)
    }
    common = _common_feature(results, broken)
    return tuple(_explained(case, broken, common) for case in results)


def _common_feature(results: tuple[CaseResult, ...], broken: set[tuple[str, str]]) -> dict[str, str]:
    """Backend: the clause of the one feature that all of its undiagnosed failures have and some passing case lacks.

    Every test puts several things together, so a wrong value whose cause is not known fails many of them.
    """
    found = {}
    for backend in {backend for case in results if _is_undiagnosed(case) for backend in _backends(case)}:
        own = [case for case in results if backend in _backends(case)]
        failed = [case for case in own if _is_undiagnosed(case)]
        passed = [case for case in own if case.verdict is Verdict.PASS and case.headroom is not None]
        for clause, has_feature in FEATURES.items():
            tells = any(not has_feature(case.case) for case in passed)
            if tells and (backend, clause) in broken and all(has_feature(case.case) for case in failed):
                found[backend] = clause
                break
        else:
            # Rows that are wrong whatever the case has: their values are all that can be said to be wrong.
            if any(case.clause == "NUM-1" and case.violations[0].field == ROWS for case in failed):
                found[backend] = "NUM-1"
    return found


def _is_undiagnosed(case: CaseResult) -> bool:
    """A wrong residual or row of which nothing more is known: it is blamed on whatever its test is about."""
    first = case.violations[0] if case.violations else None
    if first is None or first.hint:
        return False
    if first.field == "norm_out":  # wherever it is judged, it is NORM-1's at first
        return first.clause == "NORM-1"
    return first.field in UNNAMED and first.clause == case.clause


def _explained(case: CaseResult, broken: set[tuple[str, str]], common: dict[str, str]) -> CaseResult:
    diagnosed = bool(case.violations) and case.violations[0].clause != case.clause
    if case.verdict is not Verdict.FAIL or case.explained_by:
        return case
    base = BUILDS_ON.get(case.blamed)
    if base is not None and any((backend, base) in broken for backend in _backends(case)):
        return case.model_copy(update={"explained_by": base})
    shared = next((common[backend] for backend in _backends(case) if backend in common), None)
    if shared is not None and shared != case.clause and _is_undiagnosed(case):
        return case.model_copy(update={"explained_by": shared})
    if case.clause not in COMPOSITE or diagnosed:
        return case
    for clause, has_feature in FEATURES.items():
        if has_feature(case.case) and any((backend, clause) in broken for backend in _backends(case)):
            return case.model_copy(update={"explained_by": clause})
    return case


def _backends(case: CaseResult) -> list[str]:
    """Backends with their side: a backend may be both, and its producer is not to blame for its consumer."""
    sides = {"producer": case.producer, "consumer": case.consumer}
    return [f"{side}:{name}" for side, name in sides.items() if name]
