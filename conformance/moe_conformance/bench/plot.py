"""Time against tokens as an SVG, with the time that a copy of the effective bytes would take."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from moe_conformance.bench.model import BenchResult, BenchRow, Cache, Point, family

PANEL_IN = (5.2, 3.4)
"""Width and height of one panel, in inches."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
"""Okabe and Ito's palette, told apart with any colour vision, in an order of contrast; more families come around again
with another marker."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
TEXT = 8


def digest(result: BenchResult) -> str:
    """Of everything that a plot may show; written into the SVG, so that a stale one is found without drawing it."""
    return "sha256:" + hashlib.sha256(result.model_dump_json().encode()).hexdigest()


def draw(result: BenchResult, path: Path) -> None:
    """One panel for each setting that has more than one token count: cold on the left, warm on the right.

    Raises:
        ImportError: matplotlib is not installed (extra ``plot``).
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "moe-conformance"  # the same data give the same file
    from matplotlib import pyplot

    panels = _panels(result)
    lines = list(dict.fromkeys(line for line, _ in panels)) or [()]
    caches = [cache for cache in Cache if any(cache == drawn for _, drawn in panels)] or [Cache.COLD]
    size = (PANEL_IN[0] * len(caches), PANEL_IN[1] * len(lines) + 0.8)
    figure, axes = pyplot.subplots(
        len(lines), len(caches), figsize=size, squeeze=False, layout="constrained", sharex="row", sharey="row"
    )
    styles = _styles(list(dict.fromkeys(row.consumer for row in result.rows)))
    for line, places in zip(lines, axes, strict=True):
        for cache, axis in zip(caches, places, strict=True):
            if (line, cache) in panels:
                _panel(axis, panels[line, cache], result.copy_tbps, styles)
            else:
                axis.set_visible(False)
        measured = [row.median_us for each in caches for row in panels.get((line, each), []) if row.median_us]
        if measured:
            places[0].set_ylim(
                bottom=min(measured) / 2
            )  # the limit of small calls lies far below, and would squash all
    _legend(figure, axes)
    versions = f"{result.environment.device}, torch {result.environment.torch}, driver {result.driver}"
    figure.suptitle(versions, fontsize=TEXT)
    figure.savefig(path, format="svg", metadata={"Date": None, "Description": digest(result)})
    pyplot.close(figure)


def _panels(result: BenchResult) -> dict[tuple[tuple[object, ...], Cache], list[BenchRow]]:
    """The rows of each panel, by setting without cache and by cache; a single token count gives no line."""
    found: dict[tuple[tuple[object, ...], Cache], list[BenchRow]] = {}
    for row in result.rows:
        key = tuple(getattr(row, name) for name in Point.model_fields if name not in ("tokens", "cache"))
        found.setdefault((key, row.cache), []).append(row)
    return {key: rows for key, rows in found.items() if len({row.tokens for row in rows}) > 1}


def _styles(names: list[str]) -> dict[str, dict[str, Any]]:
    """A colour and a marker for each kernel, the same in every panel; its launch with PDL is dashed and hollow."""
    families = list(dict.fromkeys(map(family, names)))
    styles = {}
    for name in names:
        number = families.index(family(name))
        colour = COLOURS[number % len(COLOURS)]
        plain = name == family(name)
        styles[name] = {
            "color": colour, "marker": MARKERS[number % len(MARKERS)], "markersize": 4, "linewidth": 1.4,
            "linestyle": "-" if plain else "--", "markerfacecolor": colour if plain else "white",
        }  # fmt: skip
    return styles


def _panel(axis: Any, rows: list[BenchRow], copy_tbps: float, styles: dict[str, dict[str, Any]]) -> None:
    first = rows[0]
    tokens = sorted({row.tokens for row in rows})
    limit = [first.model_copy(update={"tokens": count}).effective_bytes / copy_tbps / 1e6 for count in tokens]
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.plot(tokens, limit, color="black", linestyle=":", linewidth=1.4, label="copy of the same bytes")
    for name in (name for name in styles if any(row.consumer == name for row in rows)):
        own = sorted((row.tokens, row.median_us) for row in rows if row.consumer == name and row.median_us is not None)
        axis.plot([t for t, _ in own], [us for _, us in own], label=name, **styles[name])
    title = f"{first.mode}, {first.cache}: N={first.ranks} H={first.hidden_size} K={first.top_k} {first.dtype}"
    axis.set_title(title, fontsize=TEXT + 1)
    _scales(axis, tokens)


def _scales(axis: Any, tokens: list[int]) -> None:
    """Ticks at what was measured, and numbers instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.set_xlabel("tokens T", fontsize=TEXT)
    axis.set_ylabel("us a call, median", fontsize=TEXT)
    axis.set_xticks(tokens, [str(count) for count in tokens], rotation=45 if len(tokens) > 8 else 0)
    axis.minorticks_off()
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.tick_params(labelsize=TEXT, labelleft=True)
    axis.grid(True, which="major", linewidth=0.3)


def _legend(figure: Any, axes: Any) -> None:
    """One for all panels, below them: the lines of one panel are often too close for labels of their own."""
    entries: dict[str, Any] = {}
    for axis in axes.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, fontsize=TEXT + 1)
