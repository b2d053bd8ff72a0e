"""The matrix of backends and clause families, cut into tables that fit the width."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from rich.table import Table
from rich.text import Text

from moe_conformance.report.model import CaseResult
from moe_conformance.verdicts import Verdict
from moe_contract.clauses import families

LEGEND = (
    "n passed, F failed, E error, O over-claimed, U under-claimed, u unsupported, - not run, V vacuous, Q quarantined"
)
MARKS: dict[Verdict, tuple[str, str]] = {
    Verdict.PASS: ("", "green"),
    Verdict.FAIL: ("F", "bold red"),
    Verdict.ERROR: ("E", "bold red"),
    Verdict.OVER_CLAIMED: ("O", "bold red"),
    Verdict.VACUOUS: ("V", "bold red"),
    Verdict.QUARANTINED: ("Q", "yellow"),
    Verdict.UNDER_CLAIMED: ("U", "yellow"),
    Verdict.UNSUPPORTED: ("u", "yellow"),
    Verdict.NOT_RUN: ("-", "yellow"),
}
"""How each verdict is written in a cell, in this order, and its style."""
KINDS = ("consumer", "producer", "pair")
NAME_WIDTH = 24
"""Widest column of names where the families need the room; longer names are folded."""
ONE_LINE = 7
"""A cell of more characters is stacked."""
GAP = 2
Cells = dict[tuple[str, str], Counter[Verdict]]


def tables(cases: Iterable[CaseResult], width: int) -> Iterator[Table]:
    """One table for each kind, or several where the families do not fit beside one another."""
    by_kind: dict[str, list[CaseResult]] = defaultdict(list)
    for case in cases:
        by_kind[kind_of(case)].append(case)
    for kind in KINDS:
        if by_kind[kind]:
            yield from _tables_of(kind, by_kind[kind], width)


def kind_of(case: CaseResult) -> str:
    """Whether the case ran a consumer, a producer or a pair."""
    if case.producer and case.consumer:
        return "pair"
    return "producer" if case.producer else "consumer"


def legend(cases: Iterable[CaseResult]) -> str:
    """What the letters mean, for those that occur."""
    present = {MARKS[case.verdict][0] for case in cases}
    parts = LEGEND.split(", ")
    return ", ".join([parts[0], *(part for part in parts[1:] if part[0] in present)])


def _tables_of(kind: str, cases: list[CaseResult], width: int) -> Iterator[Table]:
    cells: Cells = defaultdict(Counter)
    for case in cases:
        cells[case.pair, _family(case)][case.verdict] += 1
    names = list(dict.fromkeys(case.pair for case in cases))
    columns = [family for family in families() if any(cells.get((name, family)) for name in names)]
    widths = {family: _cell_width(family, names, cells) for family in columns}
    spare = width - sum(GAP + column for column in widths.values())
    name_width = max(len(kind), min(max(NAME_WIDTH, spare), max(map(len, names))))
    for chunk in _chunks(columns, widths, width - name_width):
        table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
        table.add_column(kind, width=name_width, overflow="fold", header_style="bold")
        for family in chunk:
            table.add_column(family, width=widths[family], justify="right", header_style="bold")
        for name in names:
            table.add_row(name, *(_cell(cells.get((name, family))) for family in chunk))
        yield table


def _chunks(columns: list[str], widths: dict[str, int], room: int) -> Iterator[list[str]]:
    chunk: list[str] = []
    used = 0
    for family in columns:
        if chunk and used + GAP + widths[family] > room:
            yield chunk
            chunk, used = [], 0
        chunk.append(family)
        used += GAP + widths[family]
    if chunk:
        yield chunk


def _family(case: CaseResult) -> str:
    """The family that a case is counted under: a failure's is that of the clause it is blamed on."""
    clause = case.blamed if case.verdict is Verdict.FAIL else case.clause
    return clause.rpartition("-")[0]


def _parts(counts: Counter[Verdict]) -> list[tuple[str, str]]:
    return [(f"{mark}{counts[verdict]}", style) for verdict, (mark, style) in MARKS.items() if counts[verdict]]


def _cell_width(family: str, names: list[str], cells: Cells) -> int:
    lines = [line for name in names for line in _cell(cells.get((name, family))).plain.splitlines()]
    return max(len(family), *map(len, lines))


def _cell(counts: Counter[Verdict] | None) -> Text:
    if not counts:
        return Text("")
    parts = _parts(counts)
    length = len(" ".join(text for text, _ in parts))
    return Text(" " if length <= ONE_LINE else "\n").join(Text(text, style=style) for text, style in parts)
