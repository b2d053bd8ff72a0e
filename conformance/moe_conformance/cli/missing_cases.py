"""Why a clause that was asked for has no case, and which option gives it one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_conformance.cases.profiles import PROFILE_NAMES, get_profile
from moe_conformance.cases.selection import select_cases
from moe_conformance.cli.selection import REFERENCE, SelectionOptions
from moe_conformance.marks import ConformanceTest, Kind
from moe_conformance.plan import PlannedCase, PlanRequest, suite_tests
from moe_contract import get_clause

LARGEST = PROFILE_NAMES[-1]
"""The profile to ask for where another has no case."""


def absence_notes(asked: SelectionOptions, request: PlanRequest, planned: Sequence[PlannedCase]) -> Iterator[str]:
    """One line for each clause of the request without a planned case, where the options are the reason."""
    present = {case.clause for case in planned}
    for clause in request.clauses:
        if clause not in present:
            tests = [test.metadata for test in suite_tests().values() if test.metadata.clause == clause]
            why = _why_absent(clause, tests, asked, request)
            if why:
                yield f"no case of {clause}: {why}"


def _why_absent(clause: str, tests: Sequence[ConformanceTest], asked: SelectionOptions, request: PlanRequest) -> str:
    kinds = {test.kind for test in tests}
    asked_for = _kinds_asked_for(asked)
    if not kinds & asked_for:
        side = "producer" if "producer" in kinds else "consumer"
        other = "consumer" if side == "producer" else "producer"
        whose = f"it is a {side}'s clause" if get_clause(clause).side == side else f"its tests need a {side}"
        return f"{whose}, and only --{other} is given; add --{side} NAME, such as --{side} {REFERENCE}"
    if not (request.producers if kinds == {"producer"} else request.consumers if kinds == {"consumer"} else True):
        return ""  # its backends cannot run here, which the report says of each
    profile = get_profile(request.profile)
    taken = [test for test in tests if test.kind in asked_for]
    if request.ranks and any(select_cases(profile, test, None, request.seed) for test in taken):
        sizes = ",".join(map(str, profile.default_ranks))
        given = ",".join(map(str, request.ranks))
        return f"it needs other tensor-parallel sizes than --tp {given}; leave --tp out for the profile's own, {sizes}"
    if any(select_cases(profile, test, request.ranks, request.seed) for test in taken):
        return ""
    return f"profile {profile.name} has none for it; --profile {LARGEST} has the most"


def _kinds_asked_for(asked: SelectionOptions) -> set[Kind]:
    """The kinds of tests that can take part: a side that is named alone is also tested in pairs with the reference."""
    if not asked.producers and not asked.consumers:
        return {"producer", "consumer", "pair"}
    named: set[Kind] = {"pair"}
    if asked.producers:
        named.add("producer")
    if asked.consumers:
        named.add("consumer")
    return named
