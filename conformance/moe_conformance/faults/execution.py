"""Running the suite on one fault: in this process, the clause's own tests and the smallest cases first."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from moe_conformance.direct import run_case
from moe_conformance.faults.bases import base_consumer, base_producer
from moe_conformance.faults.model import Fault, Planted, Variant
from moe_conformance.faults.results import FaultResult, Killer, Outcome, VariantResult
from moe_conformance.marks import Kind
from moe_conformance.plan import PlanRequest, parameters, suite_tests
from moe_conformance.report.attribution import explain_failures
from moe_conformance.report.failures import FailureGroup, group_failures
from moe_conformance.report.model import CaseResult
from moe_conformance.subjects.calls import Settings
from moe_conformance.verdicts import Verdict
from moe_contract import Consumer, Producer

PARTNER = "reference"
TIMEOUT_S = 30.0
"""When a fault's case is called a hang. The first compilation by torch.compile may take more than 5 s on a loaded
machine; nothing in the catalogue hangs but in a wait that has a limit of its own."""
ESCALATION = ("smoke", "core")
"""Profiles in the order in which they are tried on a fault that has not failed yet."""
KINDS: dict[str, tuple[Kind, ...]] = {
    "producer": ("producer", "pair"),
    "consumer": ("consumer", "pair"),
    "engine": ("producer", "pair"),
}
"""Which tests have a fault's side in them; an engine joins a producer to a consumer."""


@dataclass(frozen=True)
class Job:
    """One case of one test."""

    test: str
    clause: str
    kind: Kind
    case: Any

    @property
    def size(self) -> tuple[int, int]:
        """What the case costs, roughly; a consumer or a producer alone before a pair."""
        case = self.case
        return int(self.kind == "pair"), max(1, case.tokens) * case.top_k * case.hidden_size * case.ranks


@cache
def jobs(profile: str, kinds: tuple[Kind, ...]) -> tuple[Job, ...]:
    """Every case of the profile's tests of these kinds, the smallest first within a test's clause."""
    request = PlanRequest(producers=(PARTNER,), consumers=(PARTNER,), profile=profile)
    found = []
    for name, test in suite_tests().items():
        about = test.metadata
        if about.kind in kinds:
            found += [Job(name, about.clause, about.kind, p.case) for p in parameters(about, request)]
    return tuple(sorted(found, key=lambda job: job.size))


def run_fault(fault: Fault, *, quick: bool = False, escalate: bool = True) -> FaultResult:
    """The suite's verdict on a fault.

    The whole smoke profile runs, unless ``quick`` stops at the first failure of the own clause's tests. A fault that
    nothing of it notices goes on to the core profile, if ``escalate``, where the first failure ends the search.
    """
    started = time.perf_counter()
    said = ("id", "clause", "side", "family", "what", "bugs")
    fields: dict[str, Any] = {name: getattr(fault, name) for name in said}
    if fault.needs == "cuda" and not torch.cuda.is_available():
        return FaultResult(**fields, verdict="not-runnable", reason="needs a CUDA device")
    device = fault.needs or "cpu"
    results: list[CaseResult] = []
    profile = ESCALATION[0]
    with fault.plant().applied():
        for profile in ESCALATION if escalate else ESCALATION[:1]:
            stop = quick or profile != ESCALATION[0]
            for result in _run(fault.plant(), _ordered(jobs(profile, KINDS[fault.side]), fault.clause), device):
                results.append(result)
                if stop and counts(result):
                    break
            if any(map(counts, results)):
                break
    return FaultResult(**fields, **_verdict(fault, results, profile), seconds=round(time.perf_counter() - started, 3))


def run_variant(variant: Variant, profile: str = ESCALATION[0]) -> VariantResult:
    """The whole profile on a correct variant: whatever fails is a false alarm."""
    started = time.perf_counter()
    planted = variant.plant()
    kinds: tuple[Kind, ...] = KINDS["producer" if planted.producer is not None else "consumer"]
    results = list(_run(planted, jobs(profile, kinds)))
    alarms = [f"{result.id}: {result.reason}" for result in results if result.broken]
    judged = [result.headroom for result in results if result.headroom is not None]
    return VariantResult(
        id=variant.id,
        what=variant.what,
        cases=len(results),
        unsupported=sum(result.verdict is Verdict.UNSUPPORTED for result in results),
        false_alarms=tuple(alarms),
        headroom=max(judged, default=None),
        profile=planted.consumer.declaration.profile.value if planted.consumer is not None else "",
        seconds=round(time.perf_counter() - started, 3),
    )


def counts(result: CaseResult) -> bool:
    """Whether this failure is one of the backend's: not of the suite, and not a check that could not fail."""
    return result.broken and not result.suite_error and result.verdict is not Verdict.VACUOUS


def _ordered(found: Sequence[Job], clause: str) -> list[Job]:
    """The clause's own tests first."""
    return sorted(found, key=lambda job: job.clause != clause)


def _run(planted: Planted, found: Sequence[Job], device: str = "cpu") -> Iterator[CaseResult]:
    producer: Producer = planted.producer or base_producer(PARTNER)
    consumer: Consumer = planted.consumer or base_consumer(PARTNER)
    tests, settings = suite_tests(), Settings(device, TIMEOUT_S)
    for job in found:
        sides = (producer if job.kind != "consumer" else None, consumer if job.kind != "producer" else None)
        result = run_case(tests[job.test].function, job.case, *sides, settings=settings)
        yield result.model_copy(update={"test": job.test})


def _verdict(fault: Fault, results: Sequence[CaseResult], profile: str) -> dict[str, Any]:
    explained = explain_failures(results)
    failed = [result for result in explained if counts(result)]
    if not failed:
        return {"verdict": "survived", "cases": len(results)}
    groups = group_failures(failed)
    first = _clause_of(groups[0])
    own = next((group for group in groups if _clause_of(group) == fault.clause), None)
    verdict: Outcome = "killed" if first == fault.clause else "killed-by-other"
    return {
        "verdict": verdict,
        "killer": _killer(own if own is not None and verdict == "killed" else groups[0], profile),
        "blamed_first": first,
        "blamed": dict(Counter(_blamed(result) for result in failed).most_common()),
        "tests": dict(Counter(result.test for result in failed).most_common()),
        "cases": len(results),
    }


def _clause_of(group: FailureGroup) -> str:
    """The clause at the head of a group; a crash or a refusal is that of the clause whose test found it most often."""
    return group.clause or Counter(case.clause for case in group.cases).most_common(1)[0][0]


def _blamed(result: CaseResult) -> str:
    return result.blamed if result.verdict is Verdict.FAIL else result.clause


def _killer(group: FailureGroup, profile: str) -> Killer:
    case = group.shown
    return Killer(
        test=case.test,
        clause=case.clause,
        case_id=case.case_id,
        producer=case.producer,
        consumer=case.consumer,
        profile=profile,
        message=case.reason,
    )
