"""The Markdown view of a bench: what the documents show of it, between marker comments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from moe_conformance.bench.goal_list import all_findings
from moe_conformance.bench.goals import SUBJECT
from moe_conformance.bench.model import BenchResult, BenchRow
from moe_conformance.bench.table import host_costs, machine, reasons, setting

SECTIONS = ("tables", "goals")
"""Names of the sections; a document encloses each in ``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``."""


def to_markdown(result: BenchResult) -> dict[str, str]:
    """The text of each section; no goals where their subject was not timed."""
    timed = any(row.consumer == SUBJECT for row in result.rows)
    return {"tables": tables(result), "goals": goals(result) if timed else f"`{SUBJECT}` was not timed."}


def tables(result: BenchResult) -> str:
    """One table for each setting: a line for each token count, a column for each consumer, the fastest in bold."""
    lines = [
        f"{machine(result)}. Begun {result.started}, `{result.command}`.",
        "Median us of a call; **bold**: the fastest; -: not timed.",
    ]
    if not result.complete:
        lines.append("**Partial: the run was stopped before its last point.**")
    settings: dict[str, list[BenchRow]] = {}
    for row in result.rows:
        settings.setdefault(setting(row), []).append(row)
    for title, rows in settings.items():
        lines += ["", f"**{title}**", "", *_table(rows)]
    costs = host_costs(result)
    if costs:
        lines += ["", f"Host time of one eager call, T=1: {costs}."]
    if result.skipped:
        lines += ["", *(f"- {reason}" for reason in reasons(result.skipped))]
    return "\n".join(lines)


def goals(result: BenchResult) -> str:
    """Every goal with what was seen."""
    findings = all_findings(result)
    counts = Counter(finding.status.strip("*") for finding in findings)
    rows = [(each.where, each.tokens, each.goal, each.seen, each.status) for each in findings]
    total = ", ".join(f"{count} {status}" for status, count in counts.items())
    return "\n".join([f"{total}.", "", *_grid(("where", "T", "goal", "seen", ""), rows)])


def replaced(document: str, sections: dict[str, str]) -> str:
    """The document with each section's text between its markers.

    Raises:
        ValueError: a marker is missing or given twice; one line.
    """
    for name, text in sections.items():
        begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
        if document.count(begin) != 1 or document.count(end) != 1 or document.index(end) < document.index(begin):
            raise ValueError(f"expected the lines {begin} and {end} once each, in this order")
        before, _, rest = document.partition(begin)
        after = rest.partition(end)[2]
        document = f"{before}{begin}\n{text}\n{end}{after}"
    return document


def _table(rows: list[BenchRow]) -> list[str]:
    names = list(dict.fromkeys(row.consumer for row in rows))
    subject = SUBJECT if SUBJECT in names else names[0]
    found = {(row.tokens, row.consumer): row for row in rows}
    head = ("T", *names, f"{subject} to best other", f"{subject}, share of copy")
    body = []
    for tokens in sorted({row.tokens for row in rows}):
        own = found.get((tokens, subject))
        body.append((
            str(tokens),
            *_medians([found.get((tokens, name)) for name in names]),
            "-" if own is None or own.ratio_to_best is None else f"{own.ratio_to_best:.2f}",
            "-" if own is None or own.share_of_copy is None else f"{own.share_of_copy:.0%}",
        ))  # fmt: skip
    return _grid(head, body, numbers=True)


def _medians(rows: list[BenchRow | None]) -> list[str]:
    fastest = min((row.median_us for row in rows if row is not None and row.median_us is not None), default=None)
    cells = []
    for row in rows:
        if row is None:
            cells.append("-")
        elif row.median_us is None:
            cells.append("**WRONG**")
        else:
            cells.append(f"**{_us(row.median_us)}**" if row.median_us == fastest else _us(row.median_us))
    return cells


def _us(value: float) -> str:
    """Three figures, as the spread of repeated runs allows."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _grid(head: tuple[str, ...], rows: Iterable[tuple[str, ...]], numbers: bool = False) -> list[str]:
    rule = ["---:" if numbers else "---"] * len(head)
    lines = [head, tuple(rule), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
