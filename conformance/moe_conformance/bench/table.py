"""The printed view of a bench."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from moe_conformance.bench.model import BenchResult, BenchRow, Skipped

COLUMNS = ("consumer", "T", "median us", "p10", "p90", "TB/s", "of copy", "to best")


def print_result(result: BenchResult, console: Console) -> None:
    """One table for each setting, tokens down; then what was not timed, and why."""
    console.print(machine(result), highlight=False)
    settings: dict[str, list[BenchRow]] = {}
    for row in result.rows:
        settings.setdefault(setting(row), []).append(row)
    for title, rows in settings.items():
        console.print(_table(title, rows))
    costs = host_costs(result)
    if costs:
        console.print(f"host time of one eager call, T=1: {costs}", highlight=False)
    for line in reasons(result.skipped):
        console.print(line, highlight=False)
    if not result.complete:
        console.print("PARTIAL: the run was stopped before its last point", style="bold red")


def row_line(found: BenchRow | Skipped) -> str:
    """One finished measurement, for a log."""
    if isinstance(found, Skipped):
        return f"{found.consumer:<18} {found.point}: not timed: {found.reason}"
    told = "WRONG RESULT, not timed" if found.median_us is None else f"{found.median_us:.2f} us"
    return f"{found.consumer:<18} {found.label}: {told}"


def machine(result: BenchResult) -> str:
    """Device, versions and limits, in one line."""
    environment = result.environment
    return (
        f"{environment.device}, driver {result.driver}, CUDA {environment.cuda}, torch {environment.torch}; "
        f"copy {result.copy_tbps:.2f} TB/s; empty graph node {result.empty_node_us:.2f} us"
    )


def host_costs(result: BenchResult) -> str:
    """What an eager call costs the host, by consumer; empty where nothing was measured."""
    return ", ".join(f"{name} {us:.1f} us" for name, us in result.host_call_us.items())


def setting(row: BenchRow) -> str:
    """Everything of a point but its tokens."""
    return f"{row.mode}, {row.cache}: N={row.ranks} H={row.hidden_size} K={row.top_k} {row.dtype}"


def _table(title: str, rows: list[BenchRow]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "consumer" else "right")
    for row in sorted(rows, key=lambda row: row.tokens):
        table.add_row(row.consumer, str(row.tokens), *_cells(row))
    return table


def _cells(row: BenchRow) -> list[str]:
    if row.median_us is None or row.p10_us is None or row.p90_us is None:
        return ["WRONG", "", "", "", "", ""]
    share = "" if row.share_of_copy is None else f"{row.share_of_copy:.0%}"
    ratio = "" if row.ratio_to_best is None else f"{row.ratio_to_best:.2f}"
    return [f"{row.median_us:.2f}", f"{row.p10_us:.2f}", f"{row.p90_us:.2f}", f"{row.effective_tbps:.2f}", share, ratio]


def reasons(skipped: tuple[Skipped, ...]) -> list[str]:
    """Each reason once, with how many points it kept a consumer from."""
    counts: dict[tuple[str, str], int] = {}
    for entry in skipped:
        counts[entry.consumer, entry.reason] = counts.get((entry.consumer, entry.reason), 0) + 1
    return [f"not timed: {name} at {count} points: {reason}" for (name, reason), count in counts.items()]
