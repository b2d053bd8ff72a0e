"""What a run over the faults found: the model behind the terminal's matrix, the JSON and docs/faults.md."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from moe_conformance.exit_status import ExitStatus

Outcome = Literal["killed", "killed-by-other", "survived", "not-runnable"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Killer(_Record):
    """The simplest case that failed."""

    test: str
    clause: str
    """The clause that the test is about."""
    case_id: str
    producer: str | None = None
    consumer: str | None = None
    profile: str
    message: str
    """What the report says of it, in one line."""


class RuleResult(_Record):
    """What one acceptance rule in public use makes of the same fault."""

    normal: bool | None
    """Rejected on data of N(0, 1); None where the rule has nothing to compare."""
    small: bool | None
    """Rejected on data of N(0, 0.02^2)."""


class FaultResult(_Record):
    """One fault against the suite."""

    id: str
    clause: str
    side: str
    family: str
    what: str
    bugs: tuple[str, ...] = ()
    verdict: Outcome
    killer: Killer | None = None
    blamed_first: str | None = None
    """The clause at the head of the report."""
    blamed: dict[str, int] = Field(default_factory=dict)
    """Failing cases by blamed clause: the fault's row of the matrix."""
    tests: dict[str, int] = Field(default_factory=dict)
    """Failing cases by test."""
    cases: int = 0
    """Cases that ran."""
    reason: str = ""
    """Why it is not runnable here."""
    rules: dict[str, RuleResult] = Field(default_factory=dict)
    seconds: float = 0.0


class VariantResult(_Record):
    """One correct variant against the suite."""

    id: str
    what: str
    cases: int
    unsupported: int
    false_alarms: tuple[str, ...]
    """One line for each case that failed."""
    headroom: float | None = None
    rules: dict[str, RuleResult] = Field(default_factory=dict)
    profile: str = ""
    """The rounding profile of its consumer; empty for a producer."""
    seconds: float = 0.0


class MatrixReport(_Record):
    """The whole run."""

    profile: str
    faults: tuple[FaultResult, ...]
    variants: tuple[VariantResult, ...] = ()
    idle_tests: tuple[str, ...] = ()
    """Tests that no fault made fail, where the whole catalogue ran; each is justified in ``idle.py`` or removed."""
    seconds: float = 0.0

    def count(self, verdict: Outcome) -> int:
        """Faults of this verdict."""
        return sum(fault.verdict == verdict for fault in self.faults)

    @property
    def false_alarms(self) -> int:
        """Cases of correct variants that failed."""
        return sum(len(variant.false_alarms) for variant in self.variants)

    @property
    def exit_status(self) -> ExitStatus:
        """0 where every runnable fault is killed by its own clause and nothing right is blamed; 3 where nothing ran."""
        if not self.variants and not any(fault.verdict != "not-runnable" for fault in self.faults):
            return ExitStatus.NOTHING_RAN
        wrong = self.count("survived") or self.count("killed-by-other") or self.false_alarms
        return ExitStatus.BROKEN if wrong else ExitStatus.HOLDS
