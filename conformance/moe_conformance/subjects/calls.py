"""Calling a backend so that whatever it does, the suite learns it in one line."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from moe_conformance.harness.rendezvous import CollectiveMismatchError, PeerFailedError
from moe_conformance.harness.threads import HungRanksError, RankExitError, ThreadRankGroup, run_ranks
from moe_conformance.time_limits import CASE_TIMEOUT_S
from moe_conformance.verdicts import BackendError, ClauseBrokenError, OverClaimedError, UnsupportedCaseError
from moe_contract import ContractViolation, PeerTimeoutError, UnsupportedError, Violation
from moe_contract.places import place_of_error

T = TypeVar("T")
LONGEST_LINE = 300
"""Characters of a message that are shown."""


@dataclass(frozen=True)
class Settings:
    """How cases run: on which device, and how long one may take before its backend is said to hang."""

    device: str = "cpu"
    timeout_s: float = CASE_TIMEOUT_S


@contextmanager
def judged_errors(name: str, *, refusal_is_over_claim: bool = True) -> Iterator[None]:
    """Turns what a backend raises into a verdict: a refusal, a broken clause, or a crash in one line."""
    try:
        yield
    except (UnsupportedCaseError, OverClaimedError, BackendError, ClauseBrokenError, PeerFailedError):
        raise
    except CollectiveMismatchError as error:
        raise ClauseBrokenError([collective_violation(str(error))]) from error
    except UnsupportedError as error:
        if not refusal_is_over_claim:
            raise
        raise OverClaimedError(f"{name} declares support for this case but refused it: {first_line(error)}") from error
    except ContractViolation as error:
        raise ClauseBrokenError(error.violations) from error
    except HungRanksError as error:
        raise BackendError(f"{name} hangs: {error}") from error
    except PeerTimeoutError as error:
        raise BackendError(f"{name}: {first_line(error)}") from error
    except RankExitError as error:
        raise BackendError(_raised(name, error.original)) from error
    except (Exception, SystemExit, GeneratorExit) as error:  # not KeyboardInterrupt: here it is the user's
        raise BackendError(_raised(name, error)) from error


def _raised(name: str, error: BaseException) -> str:
    return f"{name} raised {type(error).__name__}: {first_line(error)} ({raised_at(error)})"


def collective_violation(message: str) -> Violation:
    """RED-4: ranks that issue different collectives."""
    return Violation(clause="RED-4", field="collectives", got=message, expected="the same collectives on every rank")


def on_every_rank(name: str, settings: Settings, size: int, function: Callable[[ThreadRankGroup], T]) -> list[T]:
    """Runs one rank's code on each of ``size`` ranks; errors become verdicts."""
    with judged_errors(name):
        return run_ranks(function, size, device=settings.device, timeout_s=settings.timeout_s)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, cut to what a terminal shows.

    What no terminal or file should be given, such as escapes and lone surrogates, is written as in a Python literal.
    """
    try:
        lines = str(error).strip().splitlines()
    except Exception as broken:  # the message is the backend's code
        return f"(no message: its __str__ raised {type(broken).__name__})"
    line = lines[0][:LONGEST_LINE] if lines else "(no message)"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line)


def raised_at(error: BaseException) -> str:
    """File and line where the error was raised: the plug-in's own where it came through one."""
    frames = traceback.extract_tb(error.__traceback__)
    innermost = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"
    return place_of_error(error) or innermost
