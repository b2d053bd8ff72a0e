"""How far a run is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from moe_conformance.report.model import CaseResult

PERCENT_STEP = 10
SECONDS_STEP = 10.0
"""A log gets a line after this share of the cases or this time, whichever comes first: few lines for a quick run, and a
slow one shows that it is alive."""


class Progress(Protocol):
    """Is told of the run's beginning, of each result as it comes, and of the end."""

    def start(self, total: int) -> None:
        """``total`` cases are about to run."""
        ...

    def advance(self, result: CaseResult) -> None:
        """One more case has its result."""
        ...

    def stop(self) -> None:
        """No more results come."""
        ...


class Silent:
    """Shows nothing."""

    def start(self, total: int) -> None:
        """Does nothing."""

    def advance(self, result: CaseResult) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""


class Counts:
    """What a line of progress says besides the share: broken cases so far."""

    def __init__(self) -> None:
        self.done = 0
        self.broken = 0

    def add(self, result: CaseResult) -> None:
        """Counts one result."""
        self.done += 1
        self.broken += result.broken


class TerminalProgress:
    """A bar with the rate and the time left; gone when the run is over."""

    def __init__(self, console: Console) -> None:
        self._counts = Counts()
        self._bar = Bar(
            TextColumn("running"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[broken]}", style="red"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("running", total=None, broken="")

    def start(self, total: int) -> None:
        """Shows the bar."""
        self._bar.update(self._task, total=total)
        self._bar.start()

    def stop(self) -> None:
        """Removes the bar."""
        self._bar.stop()

    def advance(self, result: CaseResult) -> None:
        """Moves the bar."""
        self._counts.add(result)
        broken = f"{self._counts.broken} broken" if self._counts.broken else ""
        self._bar.update(self._task, advance=1, broken=broken)


class LogProgress:
    """Plain lines, for a console that is not a terminal."""

    def __init__(self, console: Console) -> None:
        self._console, self._total = console, 0
        self._counts = Counts()
        self._began = self._last = time.monotonic()
        self._next_percent = PERCENT_STEP

    def start(self, total: int) -> None:
        """Says how much there is to do."""
        self._total = total
        self._began = self._last = time.monotonic()
        self._console.print(f"running {total} cases")

    def stop(self) -> None:
        """Leaves the lines."""

    def advance(self, result: CaseResult) -> None:
        """Prints a line when a step is passed."""
        self._counts.add(result)
        now = time.monotonic()
        if self._counts.done == 1:
            self._began = now
        percent = 100 * self._counts.done // max(self._total, 1)
        due = percent >= self._next_percent or now - self._last >= SECONDS_STEP
        if not due or self._counts.done == self._total:
            return
        self._last = now
        self._next_percent = percent // PERCENT_STEP * PERCENT_STEP + PERCENT_STEP
        share = f"{percent:3d} %  {self._counts.done}/{self._total} cases"
        self._console.print(f"{share}{self._estimate(now)}  {self._counts.broken} broken", soft_wrap=True)

    def _estimate(self, now: float) -> str:
        """Rate and time left since the first result: what came before it is the start of the workers."""
        if self._counts.done < 2 or now <= self._began:
            return ""
        rate = (self._counts.done - 1) / (now - self._began)
        return f"  {rate:.1f}/s  about {(self._total - self._counts.done) / rate:.0f} s left"


class _Rate(ProgressColumn):
    """Cases per second."""

    def render(self, task: Task) -> Text:
        """The rate of the last half minute, as rich keeps it."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed:.1f}/s")
