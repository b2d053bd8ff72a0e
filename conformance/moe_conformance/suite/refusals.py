"""Steps of conformance tests: being refused."""

from __future__ import annotations

from collections.abc import Callable

from moe_conformance.cases.tail_data import TailInputs
from moe_conformance.subjects.calls import first_line
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.verdicts import BackendError, ClauseBrokenError, OverClaimedError
from moe_contract import ContractViolation, TailOutput, UnsupportedError, Violation

REFUSALS = (UnsupportedError, ValueError, TypeError)
"""What a backend raises to refuse: UnsupportedError, a ContractViolation (a ValueError), ValueError or TypeError."""


def refusal(call: Callable[[], object]) -> str | None:
    """The one-line message with which a backend refuses; None when it returns.

    A refusal is an exception of REFUSALS with a message, met under ``judged_errors``. Any other exception is a crash.
    """
    try:
        call()
    except OverClaimedError as error:
        return _message(error.__cause__ or error)
    except ClauseBrokenError as error:
        if isinstance(error.__cause__, ContractViolation):
            return _message(error.__cause__)
        raise
    except BackendError as error:
        if isinstance(error.__cause__, REFUSALS):
            return _message(error.__cause__)
        raise
    return None


def _message(error: BaseException) -> str:
    message = first_line(error)
    if message == "(no message)":
        raise BackendError(f"refused with {type(error).__name__} and no message; say what was expected and what came")
    return message


def require_refused_or_right(tail: TailSubject, handed: TailInputs, truth: TailInputs) -> None:
    """Inputs that break the contract are refused, or at least do no harm: the result is that of ``truth``."""
    results: list[list[TailOutput]] = []
    if refusal(lambda: results.append(tail.run(handed))) is not None:
        return
    try:
        tail.judge(results[0], truth, controls=False)
    except ClauseBrokenError as error:
        # Whatever comes out wrong, what it was handed is the cause: on whole inputs other tests judge the same steps.
        raise error.blaming(tail.clause) from error


def require_refused(tail: TailSubject, handed: TailInputs, what: str) -> None:
    """Inputs that break the contract are refused with a message."""
    if refusal(lambda: tail.run(handed)) is None:
        expected = "a refusal (UnsupportedError, ValueError or TypeError with a message)"
        raise ClauseBrokenError(
            [Violation(clause=tail.clause, field="output", got=f"a result for {what}", expected=expected)]
        )
