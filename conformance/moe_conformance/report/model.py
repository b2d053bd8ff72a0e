"""The result model: what report.json holds, and what every other view is made from."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moe_conformance.exit_status import ExitStatus
from moe_conformance.verdicts import BROKEN, Verdict
from moe_contract import Violation

SCHEMA_VERSION = 1
"""Raised with every change that an older reader would misread."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Environment(_Record):
    """Where a run took place."""

    suite_version: str
    contract_version: str
    python: str
    torch: str
    platform: str
    device: str
    """``cpu``, or the name of the GPU."""
    compute_capability: str | None = None
    cuda: str | None = None
    """CUDA version that torch was built with, when the device is a GPU."""
    revision: str | None = None
    """Commit of the checkout; None when installed from a wheel."""
    dirty: bool | None = None
    """Whether the checkout had uncommitted changes."""


class CaseResult(_Record):
    """One case of one test with one backend or pair."""

    id: str
    """Stable and unique within a run: ``test[producer+consumer:case]``."""
    test: str
    """``module::function`` of the conformance test."""
    clause: str
    """The clause the test is about."""
    producer: str | None = None
    consumer: str | None = None
    case: dict[str, Any] = Field(default_factory=dict)
    """The parameters that make the case."""
    case_id: str = ""
    verdict: Verdict
    reason: str = ""
    """One line: why, for every verdict but ``pass``."""
    violations: tuple[Violation, ...] = ()
    """``fail`` only; the first one is blamed."""
    explained_by: str | None = None
    """``fail`` only: a clause that this backend breaks by itself and that accounts for this failure."""
    headroom: float | None = None
    """max(error / bound) over everything judged numerically; at most 1 for a correct result. None: nothing numeric, or,
    after JSON, which has no infinity, an infinite ratio; the verdict is then not ``pass``."""
    suite_error: bool = False
    """``error`` only: the suite itself failed, not the backend."""
    duration_s: float = 0.0

    @property
    def pair(self) -> str:
        """Producer and consumer as a reader sees them."""
        return " x ".join(name for name in (self.producer, self.consumer) if name)

    @property
    def blamed(self) -> str:
        """The clause that a failure is counted under."""
        if self.explained_by:
            return self.explained_by
        return self.violations[0].clause if self.violations else self.clause

    @property
    def broken(self) -> bool:
        """Whether a run with this result cannot have exit status 0."""
        return self.verdict in BROKEN


class BackendRecord(_Record):
    """A backend that took part, or that could not and why."""

    name: str
    side: Literal["producer", "consumer"]
    version: str = ""
    emulated: bool = False
    rounding_profile: str | None = None
    not_run_reason: str = ""
    """Empty when it ran."""


class Selection(_Record):
    """What was asked for."""

    profile: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    ranks: tuple[int, ...]
    ranks_given: bool = False
    """Whether ``--tp`` gave them; otherwise they are the profile's."""
    clauses: tuple[str, ...] = ()
    """Empty: all."""
    device: str = "cpu"
    seed: int = 0
    timeout_s: float | None = None
    """Seconds that one case might take; None for the default."""
    shard: str | None = None
    reductions: tuple[str, ...] = ()
    """What a profile cut down from the real model, such as an intermediate size, and why."""


class Report(_Record):
    """One run."""

    schema_version: Literal[1] = 1
    complete: bool
    """False: the run was stopped; what is here is valid but not all."""
    started: str
    """ISO 8601, UTC."""
    duration_s: float
    selection: Selection
    environment: Environment
    backends: tuple[BackendRecord, ...]
    manifest: tuple[str, ...] = ()
    """Ids that had to run."""
    cases: tuple[CaseResult, ...]
    suite_errors: tuple[str, ...] = ()
    """What went wrong outside any case, such as a test file that cannot be collected; one line each."""
    command: str = ""
    """The command that repeats the run."""

    def count(self) -> Counter[Verdict]:
        """Cases by verdict."""
        return Counter(case.verdict for case in self.cases)

    @property
    def missing(self) -> tuple[str, ...]:
        """Ids of the manifest without a result."""
        present = {case.id for case in self.cases}
        return tuple(case_id for case_id in self.manifest if case_id not in present)

    @property
    def partial(self) -> bool:
        """Whether a planned case has no outcome: the run was stopped, or a backend was given up after crashes."""
        return not self.complete or bool(self.missing) or self.count()[Verdict.NOT_RUN] > 0

    @property
    def outcome_status(self) -> ExitStatus:
        """The exit status that the cases which ran would have by themselves."""
        if self.suite_errors or any(case.suite_error or case.verdict is Verdict.VACUOUS for case in self.cases):
            return ExitStatus.UNUSABLE
        if any(case.broken for case in self.cases):
            return ExitStatus.BROKEN
        return ExitStatus.HOLDS if any(case.verdict is Verdict.PASS for case in self.cases) else ExitStatus.NOTHING_RAN

    @property
    def exit_status(self) -> ExitStatus:
        """0 all clauses hold; 1 one is broken; 2 a suite error, or planned cases did not run; 3 nothing passed."""
        holds = self.outcome_status is ExitStatus.HOLDS
        return ExitStatus.UNUSABLE if holds and self.partial else self.outcome_status


def largest_headroom(cases: tuple[CaseResult, ...]) -> CaseResult | None:
    """The passing case that came closest to its bound."""
    judged = [case for case in cases if case.headroom is not None and case.verdict is Verdict.PASS]
    return max(judged, key=lambda case: case.headroom or 0.0, default=None)
