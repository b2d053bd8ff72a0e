"""``moe-conformance faults``: the kill matrix."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moe_conformance.cli.errors import unknown
from moe_conformance.cli.selection import check_clause
from moe_conformance.cli.values import parse_file, parse_workers
from moe_conformance.faults.catalogue import faults, variants
from moe_conformance.faults.kill_matrix import run_matrix
from moe_conformance.faults.results import FaultResult, MatrixReport, Outcome, VariantResult
from moe_conformance.faults.rules import RULES
from moe_conformance.faults.tests_without_fault import JUSTIFIED
from moe_conformance.report.terminal import HEADLINES, make_console
from moe_contract.clauses import registry

MARKS: dict[Outcome, tuple[str, str]] = {
    "killed": ("killed", "green"),
    "killed-by-other": ("other", "bold red"),
    "survived": ("SURVIVED", "bold red"),
    "not-runnable": ("not run", "yellow"),
}
OTHERS_SHOWN = 3
"""Further clauses of a row that the terminal names; the JSON has all."""


def faults_command(
    clauses: Sequence[str], ids: Sequence[str], *, workers: str, quick: bool, json: str | None, quiet: bool
) -> int:
    """Runs, prints, writes; the exit status. A part of the catalogue runs without the correct variants."""
    count, chosen = parse_workers(workers), select_faults(clauses, ids)
    whole = len(chosen) == len(faults())
    file = parse_file("--json", json)
    console = make_console()

    def progress(result: FaultResult | VariantResult) -> None:
        if not quiet and isinstance(result, FaultResult) and result.verdict in ("survived", "killed-by-other"):
            console.print(Text(f"{result.verdict}: {result.id} ({result.clause})", style="bold red"), soft_wrap=True)

    report = run_matrix(
        chosen, tuple(variants()) if whole else (), quick=quick, workers=count, progress=progress
    )  # fmt: skip
    if file is not None:
        file.write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")
    print_matrix(report, console, quiet=quiet)
    return report.exit_status


def select_faults(clauses: Sequence[str], ids: Sequence[str]) -> list[str]:
    """The ids of the faults that were asked for; all where nothing was. CommandError for what does not exist."""
    for name in ids:
        if name not in faults():
            raise unknown("fault", name, faults())
    wanted = {check_clause(clause) for clause in clauses}
    return [
        fault.id
        for fault in faults().values()
        if (not ids or fault.id in ids) and (not wanted or fault.clause in wanted)
    ]


def print_matrix(report: MatrixReport, console: Console, *, quiet: bool = False) -> None:
    """A row a fault, in the order of the clauses; then variants, rules, idle tests and one line."""
    if not quiet and report.faults:
        console.print(_fault_table(report))
        console.print()
    if not quiet and report.variants:
        console.print(_variant_table(report))
        console.print()
    for variant in report.variants:
        for alarm in variant.false_alarms:
            console.print(Text(f"FALSE ALARM  {variant.id}: {alarm}", style="bold red"), soft_wrap=True)
    if not quiet and any(fault.rules for fault in report.faults):
        console.print(_rule_table(report))
        console.print()
    for test in report.idle_tests:
        reason = JUSTIFIED.get(test, "no reason is known: give one in faults/tests_without_fault.py, or remove it")
        console.print(Text(f"kills nothing: {test} ({reason})", style="yellow"), soft_wrap=True)
    console.print(Text("\n".join(textwrap.wrap(summary(report), console.width))), soft_wrap=True)


def summary(report: MatrixReport) -> str:
    """The last line."""
    verdicts: tuple[Outcome, ...] = ("killed", "killed-by-other", "survived", "not-runnable")
    counts = ", ".join(f"{report.count(verdict)} {verdict}" for verdict in verdicts)
    word = HEADLINES[report.exit_status][0]
    cases = sum(variant.cases for variant in report.variants)
    right = f"; {len(report.variants)} correct variants, {cases} cases, {report.false_alarms} false alarms"
    closest = [variant.headroom for variant in report.variants if variant.headroom is not None]
    headroom = f", largest error/bound {max(closest):.4f}" if closest else ""
    return (
        f"{word}  {len(report.faults)} faults: {counts}{right if report.variants else ''}{headroom}; "
        f"{report.seconds:.0f} s; exit status {report.exit_status}"
    )


def _fault_table(report: MatrixReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("clause", "fault", "verdict", "by"):
        table.add_column(name, header_style="bold", overflow="fold")
    order = {clause: number for number, clause in enumerate(registry())}
    for fault in sorted(report.faults, key=lambda fault: order[fault.clause]):
        word, style = MARKS[fault.verdict]
        table.add_row(fault.clause, fault.id, Text(word, style=style), _killed_by(fault))
    return table


def _killed_by(fault: FaultResult) -> str:
    """The clauses that failing cases are blamed on, and the case that shows it best."""
    if fault.killer is None:
        return fault.reason
    counts = [f"{clause} {count}" for clause, count in fault.blamed.items()]
    more = f" +{len(counts) - OTHERS_SHOWN}" if len(counts) > OTHERS_SHOWN else ""
    return f"{', '.join(counts[:OTHERS_SHOWN])}{more}; {fault.killer.case_id}"


def _variant_table(report: MatrixReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("correct variant", "profile", "cases", "false alarms", "largest error/bound"):
        table.add_column(name, header_style="bold")
    for variant in report.variants:
        headroom = "" if variant.headroom is None else f"{variant.headroom:.4f}"
        alarms = str(len(variant.false_alarms))
        table.add_row(variant.id, variant.profile, str(variant.cases), alarms, headroom)
    return table


def _rule_table(report: MatrixReport) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("acceptance rule", "faults seen at N(0, 1)", "at N(0, 0.02^2)", "of", "correct variants rejected"):
        table.add_column(name, header_style="bold")
    compared = [fault for fault in report.faults if fault.rules]
    for rule in RULES:
        seen = [fault.rules[rule] for fault in compared]
        counts = (sum(bool(result.normal) for result in seen), sum(bool(result.small) for result in seen))
        wrong = [variant.rules[rule] for variant in report.variants if variant.rules]
        alarms = sum(bool(result.normal) or bool(result.small) for result in wrong)
        table.add_row(rule, *map(str, counts), str(len(compared)), f"{alarms} of {len(wrong)}" if wrong else "")
    own = sum(fault.verdict == "killed" for fault in compared)
    table.add_row("this suite, all of its cases", str(own), str(own), str(len(compared)), _alarms(report))
    return table


def _alarms(report: MatrixReport) -> str:
    wrong = sum(bool(variant.false_alarms) for variant in report.variants)
    return f"{wrong} of {len(report.variants)}" if report.variants else ""
