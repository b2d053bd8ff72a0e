"""Whatever a backend raises is one line that names it, and never ends the run."""

from __future__ import annotations

import sys

import pytest

from moe_conformance.harness.threads import ThreadRankGroup
from moe_conformance.subjects.calls import Settings, first_line, judged_errors, on_every_rank
from moe_conformance.verdicts import BackendError


class Unprintable(RuntimeError):
    """Its message is code that fails."""

    def __str__(self) -> str:
        raise ValueError("no")


@pytest.mark.parametrize(("error", "line"), [
    (RuntimeError("bad \udcff \x00 \x1b[31m red"), r"bad \udcff \x00 \x1b[31m red"),
    (RuntimeError("größer\nsecond"), "größer"),
    (RuntimeError(), "(no message)"),
    (Unprintable(), "(no message: its __str__ raised ValueError)"),
])  # fmt: skip
def test_a_message_is_one_printable_line(error: Exception, line: str) -> None:
    """Escapes, surrogates and failing messages reach neither terminal nor report."""
    assert first_line(error) == line


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, MemoryError])
def test_a_rank_that_would_end_the_program_is_an_error_of_its_backend(kind: type[BaseException]) -> None:
    """Only the user ends the run."""

    def one_rank(group: ThreadRankGroup) -> None:
        if group.rank == 1:
            raise kind("stop")

    with pytest.raises(BackendError, match=rf"^acme raised {kind.__name__}: stop \(test_backend_errors.py:\d+\)$"):
        on_every_rank("acme", Settings(), 2, one_rank)


def test_ctrl_c_of_the_user_is_no_error_of_a_backend() -> None:
    """In the main thread KeyboardInterrupt goes through."""
    with pytest.raises(KeyboardInterrupt), judged_errors("acme"):
        raise KeyboardInterrupt


def test_a_lowered_recursion_limit_does_not_outlast_the_call() -> None:
    """It is the whole interpreter's."""
    before = sys.getrecursionlimit()
    on_every_rank("acme", Settings(), 1, lambda group: sys.setrecursionlimit(100))
    assert sys.getrecursionlimit() == before
