"""The verdicts of a case, and what a test raises for each that is not a pass."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from moe_contract import Violation


class Verdict(StrEnum):
    """The outcome of one case."""

    PASS = "pass"
    FAIL = "fail"
    """A clause is broken."""
    ERROR = "error"
    """The backend crashed, hung or returned something that cannot be judged; or the suite itself failed."""
    UNSUPPORTED = "unsupported"
    """Declared unsupported, or not possible on this machine; never counted as a pass."""
    NOT_RUN = "not-run"
    VACUOUS = "vacuous"
    """The check could not have failed on this data: an error of the suite."""
    QUARANTINED = "quarantined"
    """A known failure, with an issue and an expiry."""
    OVER_CLAIMED = "over-claimed"
    """Declared supported, but refused."""
    UNDER_CLAIMED = "under-claimed"
    """Declared unsupported, but works."""


BROKEN = frozenset({Verdict.FAIL, Verdict.ERROR, Verdict.VACUOUS, Verdict.OVER_CLAIMED})
"""Verdicts that no run with exit status 0 has."""


class ClauseBrokenError(AssertionError):
    """One or more clauses are broken; the first violation is the one that is blamed."""

    def __init__(self, violations: Sequence[Violation], headroom: float | None = None) -> None:
        self.violations = tuple(violations)
        self.headroom = headroom
        super().__init__("\n".join(str(violation) for violation in self.violations))

    def blaming(self, clause: str) -> ClauseBrokenError:
        """The same failure, blamed on ``clause``."""
        violations = [violation.model_copy(update={"clause": clause}) for violation in self.violations]
        return ClauseBrokenError(violations, self.headroom)


class UnsupportedCaseError(Exception):
    """The case cannot run: the declaration says so, or the machine lacks what it needs."""


class VacuousCaseError(Exception):
    """A negative control was not rejected: the case could not have failed."""


class OverClaimedError(Exception):
    """The backend refused what its declaration says it supports."""


class UnderClaimedError(Exception):
    """The backend did, correctly, what its declaration says it does not support."""


class BackendError(Exception):
    """The backend raised, hung, or returned what cannot be judged. The message is one line for its author."""
