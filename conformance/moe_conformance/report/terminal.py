"""A report as a person reads it: failures first, then the matrix, then what did not run, then one line."""

from __future__ import annotations

import os
import sys
import textwrap
from collections import Counter
from typing import TextIO

from rich.console import Console
from rich.text import Text

from moe_conformance.exit_status import ExitStatus
from moe_conformance.report.failures import block, group_failures, sizes
from moe_conformance.report.matrix import legend, tables
from moe_conformance.report.model import CaseResult, Report, largest_headroom
from moe_conformance.verdicts import Verdict

INDENT = " " * 6
"""As wide as ``FAIL  ``, so that the lines of a block stand under its clause."""
STYLES = {"header": "bold red", "text": "", "values": "", "hint": "bold", "count": "dim", "command": "cyan"}
MOST_GROUPS = 12
MOST_REASONS = 12
"""A terminal shows this many; -v shows all, and report.json has every case."""
SLOWEST = 10
LOG_WIDTH = 120
"""Columns when the output is a file or a pipe, where no terminal gives a width."""
HEADLINES = {
    ExitStatus.HOLDS: ("PASSED", "bold green"),
    ExitStatus.BROKEN: ("FAILED", "bold red"),
    ExitStatus.UNUSABLE: ("ERROR", "bold red"),
    ExitStatus.NOTHING_RAN: ("NOTHING RAN", "bold red"),
}
PARTIAL = ("PARTIAL", "bold red")
"""In their place where the exit status is 2 for the cases alone that did not run."""


def make_console(file: TextIO | None = None) -> Console:
    """A console on stdout; without colours where NO_COLOR is set, as wide as the terminal or COLUMNS says."""
    stream = file or sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else LOG_WIDTH
    return Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def print_report(report: Report, console: Console, *, verbosity: int = 0) -> None:
    """The whole report; ``verbosity`` -1 leaves failures and the last line, 1 shortens nothing."""
    for text in report.suite_errors:
        _wrapped(console, f"SUITE ERROR  {text}", "bold red")
    _print_failures(report, console, verbosity)
    if verbosity >= 0:
        _print_matrix(report, console)
        _print_reasons(report, console, verbosity)
    if verbosity > 0:
        _print_slowest(report, console)
    word, style = PARTIAL if report.exit_status != report.outcome_status else HEADLINES[report.exit_status]
    lines = textwrap.wrap(f"{word}  {summary(report)}", console.width, subsequent_indent=" " * (len(word) + 2))
    last = Text("\n".join(lines))
    last.stylize(style, 0, len(word))
    console.print(last, soft_wrap=True)


def summary(report: Report) -> str:
    """The last line, after its first word."""
    counts = report.count()
    parts = [", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict]) or "no cases"]
    if report.partial:
        parts.insert(0, f"{'cases were not run' if report.complete else 'stopped'}, so this report is partial")
    closest = largest_headroom(report.cases)
    if closest is not None and closest.headroom:  # 0 where every comparison was one of bits
        parts.append(f"largest error/bound {closest.headroom:.3g} ({closest.clause} {closest.pair} {sizes(closest)})")
    parts.append(f"{report.duration_s:.1f} s")
    shard = f" shard {report.selection.shard}" if report.selection.shard else ""
    parts.append(f"profile {report.selection.profile}{shard} on {report.environment.device}")
    parts.append(f"exit status {report.exit_status}")
    return "; ".join(parts)


def _print_failures(report: Report, console: Console, verbosity: int) -> None:
    groups = group_failures(report.cases)
    shown = groups if verbosity > 0 else groups[:MOST_GROUPS]
    said: set[str] = set()
    for group in shown:
        lines = block(group, report.selection, with_text=group.clause not in said)
        said.add(group.clause)
        for kind, text in lines:
            if kind == "command":
                # Never wrapped: it is there to be copied.
                console.print(Text(INDENT + text, style=STYLES[kind]), soft_wrap=True)
            else:
                _wrapped(console, text, STYLES[kind], first="" if kind == "header" else INDENT)
        console.print()
    if len(groups) > len(shown):
        _wrapped(
            console, f"... and {len(groups) - len(shown)} more groups of failures: -v shows all of them", "bold red"
        )
        console.print()


def _print_matrix(report: Report, console: Console) -> None:
    if not report.cases:
        return
    for table in tables(report.cases, console.width):
        console.print(table)
        console.print()
    _wrapped(console, f"cells: {legend(report.cases)}", "dim", rest="  ")


def _print_reasons(report: Report, console: Console, verbosity: int) -> None:
    limit = None if verbosity > 0 else MOST_REASONS
    for verdict in (Verdict.UNSUPPORTED, Verdict.NOT_RUN, Verdict.UNDER_CLAIMED, Verdict.QUARANTINED):
        _print_counted(console, verdict.value, [case for case in report.cases if case.verdict is verdict], limit)
    absent = [backend for backend in report.backends if backend.not_run_reason]
    if absent:
        _wrapped(console, "not run:", "yellow")
    for backend in absent:
        _wrapped(console, f"{backend.side} {backend.name}: {backend.not_run_reason}", "", first="  ", rest=INDENT)
    for text in report.selection.reductions:
        _wrapped(console, f"reduced: {text}", "dim", rest="  ")
    if report.cases or absent:
        console.print()


def _print_counted(console: Console, title: str, cases: list[CaseResult], limit: int | None) -> None:
    """How often each reason occurs, whichever backend it is said of."""
    if not cases:
        return
    counted = Counter(_reason_of_any(case) for case in cases).most_common()
    _wrapped(console, f"{title}:", "yellow")
    for reason, count in counted[:limit]:
        who = {case.pair for case in cases if _reason_of_any(case) == reason}
        names = next(iter(who)) if len(who) == 1 else f"{len(who)} backends or pairs"
        _wrapped(console, f"{count:5d}  {reason} ({names})", "", rest=" " * 7)
    if limit is not None and len(counted) > limit:
        rest = sum(count for _, count in counted[limit:])
        _wrapped(console, f"{rest:5d}  for {len(counted) - limit} more reasons: -v shows them", "dim", rest=" " * 7)


def _reason_of_any(case: CaseResult) -> str:
    """The reason without the name of the backend that it begins with."""
    for name in (case.producer, case.consumer):
        if name and case.reason.startswith(f"{name} "):
            return case.reason.removeprefix(f"{name} ")
    return case.reason or "no reason given"


def _print_slowest(report: Report, console: Console) -> None:
    slowest = sorted(report.cases, key=lambda case: -case.duration_s)[:SLOWEST]
    _wrapped(console, "slowest cases:", "bold")
    for case in slowest:
        console.print(Text(f"{case.duration_s:8.2f} s  {case.id}"), soft_wrap=True)
    console.print()


def _wrapped(console: Console, text: str, style: str, *, first: str = "", rest: str = INDENT) -> None:
    """One paragraph within the console's width, its later lines indented."""
    lines = textwrap.wrap(
        text,
        width=console.width,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )
    console.print(Text("\n".join(lines), style=style), soft_wrap=True)
