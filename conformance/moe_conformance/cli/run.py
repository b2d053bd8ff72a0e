"""``moe-conformance run``."""

from __future__ import annotations

import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from moe_conformance.cli.errors import CommandError
from moe_conformance.cli.missing_cases import absence_notes
from moe_conformance.cli.selection import SelectionOptions, select
from moe_conformance.cli.values import parse_workers
from moe_conformance.plan import PlanError, plan
from moe_conformance.report.progress import LogProgress, Progress, Silent, TerminalProgress
from moe_conformance.report.terminal import make_console, print_report
from moe_conformance.report.writer import ReportFolderError, prepare_folder, write_report
from moe_conformance.runner import Shard, ShardError, run

SHORTEST_TIMEOUT_S = 0.1
"""Below it no case ends in time, and every backend would be said to hang."""
LONGEST_TIMEOUT_S = 86_400
"""A day. Timers of the operating system take no arbitrarily large number."""


@dataclass(frozen=True)
class RunOptions:
    """The options that do not select cases, as the user wrote them."""

    workers: str
    shard: str | None
    report: str | None
    timeout_s: float
    verbosity: int


def run_command(asked: SelectionOptions, options: RunOptions) -> int:
    """Runs, prints, writes; the exit status. Every option is checked before the first case runs."""
    workers, shard = parse_workers(options.workers), parse_shard(options.shard)
    if not SHORTEST_TIMEOUT_S <= options.timeout_s <= LONGEST_TIMEOUT_S:
        raise CommandError(
            f"--timeout: expected seconds from {SHORTEST_TIMEOUT_S} to {LONGEST_TIMEOUT_S} (a day), "
            f"got {options.timeout_s}"
        )
    report_dir = parse_folder(options.report)
    selected = select(asked)
    try:
        if report_dir is not None:
            prepare_folder(report_dir)
        console = make_console()
        for note in absence_notes(asked, selected.request, plan(selected.request) if asked.clauses else ()):
            console.print(Text("\n".join(textwrap.wrap(note, console.width)), style="yellow"), soft_wrap=True)
        report = run(
            selected.request,
            workers=workers,
            shard=shard,
            progress=_progress(console, options.verbosity),
            timeout_s=options.timeout_s,
            backends=selected.backends,
            command=shlex.join(["moe-conformance", *sys.argv[1:]]),
            verbose=options.verbosity > 0,
        )
        if report_dir is not None:
            write_report(report, report_dir)
    except (ReportFolderError, PlanError) as error:
        raise CommandError(str(error)) from error
    print_report(report, console, verbosity=options.verbosity)
    return report.exit_status


def parse_folder(text: str | None) -> Path | None:
    """The report's folder; an empty name, as an unset variable of a script gives it, is refused."""
    if text is not None and not text.strip():
        raise CommandError(f"--report: expected a folder such as report, or . for this one, got {text!r}")
    return None if text is None else Path(text)


def parse_shard(text: str | None) -> Shard | None:
    """``I/N``; raises CommandError."""
    try:
        return None if text is None else Shard.parse(text)
    except ShardError as error:
        raise CommandError(f"--shard: {error}") from error


def _progress(console: Console, verbosity: int) -> Progress:
    if verbosity < 0:
        return Silent()
    return TerminalProgress(console) if console.is_terminal else LogProgress(console)
