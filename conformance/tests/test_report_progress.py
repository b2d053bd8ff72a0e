"""Progress while cases run: lines in a log, a bar on a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from moe_conformance.report.progress import LogProgress, TerminalProgress

from .report_factory import NARROW, failure, result


def test_log_gets_a_line_for_each_tenth() -> None:
    """A hundred quick cases are nine lines after the first, the end being said by the report."""
    console = Console(file=io.StringIO(), width=NARROW)
    progress = LogProgress(console)
    progress.start(100)
    for number in range(100):
        progress.advance(result(number=number) if number else failure())
    progress.stop()
    assert isinstance(console.file, io.StringIO)
    first, *lines = console.file.getvalue().splitlines()
    assert first == "running 100 cases"
    assert [line[:4].strip() for line in lines] == [str(percent) for percent in range(10, 100, 10)]
    assert all(line.endswith("1 broken") for line in lines)


def test_bar_counts_to_the_end() -> None:
    """On a terminal the bar shows done and total, and counts what is broken."""
    console = Console(file=io.StringIO(), width=NARROW, force_terminal=True)
    progress = TerminalProgress(console)
    progress.start(2)
    progress.advance(failure())
    progress.advance(result())
    progress.stop()
    assert isinstance(console.file, io.StringIO)
    assert "2/2" in console.file.getvalue() and "1 broken" in console.file.getvalue()
