"""Time against tokens as an SVG, with the time that a copy of the effective bytes would take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moe_conformance.bench.model import BenchResult, BenchRow, Point

WIDTH_IN, HEIGHT_IN = 7.0, 4.2
"""Of one panel, in inches."""


def draw(result: BenchResult, path: Path) -> None:
    """One panel for each setting that has more than one token count.

    Raises:
        ImportError: matplotlib is not installed (extra ``plot``).
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "moe-conformance"  # the same data give the same file
    from matplotlib import pyplot

    panels: dict[tuple[object, ...], list[BenchRow]] = {}
    for row in result.rows:
        key = tuple(getattr(row, name) for name in Point.model_fields if name != "tokens")
        panels.setdefault(key, []).append(row)
    drawn = [rows for rows in panels.values() if len({row.tokens for row in rows}) > 1]
    figure, axes = pyplot.subplots(
        max(1, len(drawn)), 1, figsize=(WIDTH_IN, HEIGHT_IN * max(1, len(drawn))), squeeze=False, layout="constrained"
    )
    for axis, rows in zip(axes[:, 0], drawn, strict=False):
        _panel(axis, rows, result.copy_tbps)
    figure.suptitle(
        f"{result.environment.device}, torch {result.environment.torch}, driver {result.driver}", fontsize=9
    )
    figure.savefig(path, format="svg", metadata={"Date": None})
    pyplot.close(figure)


def _panel(axis: Any, rows: list[BenchRow], copy_tbps: float) -> None:
    first = rows[0]
    tokens = sorted({row.tokens for row in rows})
    limit = [first.model_copy(update={"tokens": count}).effective_bytes / copy_tbps / 1e6 for count in tokens]
    axis.loglog(tokens, limit, color="black", linestyle=":", label="copy of the same bytes")
    for name in dict.fromkeys(row.consumer for row in rows):
        own = sorted((row.tokens, row.median_us) for row in rows if row.consumer == name and row.median_us is not None)
        axis.loglog([t for t, _ in own], [us for _, us in own], marker="o", markersize=3, label=name)
    title = f"{first.mode}, {first.cache}: N={first.ranks} H={first.hidden_size} K={first.top_k} {first.dtype}"
    axis.set_title(title, fontsize=10)
    axis.set_xlabel("tokens")
    axis.set_ylabel("us a call, median")
    axis.grid(True, which="both", linewidth=0.3)
    axis.legend(fontsize=8)
