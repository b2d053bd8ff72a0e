"""``moe-conformance bench``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from moe_conformance.bench.grid import Grid
from moe_conformance.bench.markdown import SECTIONS, replaced, to_markdown
from moe_conformance.bench.model import BenchResult, Cache, Mode
from moe_conformance.bench.table import print_result, row_line
from moe_conformance.cli.errors import CommandError, unknown
from moe_conformance.cli.values import parse_file
from moe_conformance.exit_status import ExitStatus
from moe_conformance.report.terminal import make_console
from moe_conformance.report.writer import ReportFolderError, write_whole
from moe_contract import Consumer, PlugInError
from moe_contract.discovery import BackendNotFoundError, installed_backends, load_backend, load_consumer

DTYPES = ("bfloat16", "float16")
LARGEST = 2**20
"""Of any size: beyond it a single call would not fit in the memory of a GPU."""


@dataclass(frozen=True)
class BenchOptions:
    """The options as the user wrote them; lists are comma-separated, None is the grid's default."""

    consumers: tuple[str, ...]
    tokens: str | None
    hidden: str | None
    top_k: str | None
    tp: str | None
    dtypes: str | None
    modes: str | None
    caches: str | None
    json: str | None
    plot: str | None
    source: str | None
    markdown: bool = False
    document: str | None = None


def bench_command(options: BenchOptions) -> int:
    """Times, prints, writes. 1 where a result was wrong, 3 where nothing was timed."""
    json, plot, document = (
        parse_file("--json", options.json),
        parse_file("--plot", options.plot),
        _document(options.document),
    )
    if plot is not None:
        _require_matplotlib()
    result = _run(options, parse_grid(options), json) if options.source is None else read_result(options.source)
    if options.markdown:
        print("\n\n".join(to_markdown(result).values()))
    else:
        print_result(result, make_console())
    _save(json, result)
    if document is not None:
        _write(document, replaced(document.read_text(encoding="utf-8"), to_markdown(result)))
    if plot is not None:
        from moe_conformance.bench.plot import draw

        draw(result, plot)
    if not any(row.correct for row in result.rows):
        return ExitStatus.NOTHING_RAN
    return ExitStatus.HOLDS if all(row.correct for row in result.rows) else ExitStatus.BROKEN


def _save(path: Path | None, result: BenchResult) -> None:
    if path is not None:
        _write(path, result.model_dump_json(indent=1) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        write_whole(path, text.encode())
    except ReportFolderError as error:
        raise CommandError(str(error)) from error


def _run(options: BenchOptions, grid: Grid, json: Path | None) -> BenchResult:
    # Ranks of one GPU wait for each other inside kernels: a kernel that is loaded at its first launch would wait for
    # the whole device, and with it for the rank that waits for it.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    import torch

    if not torch.cuda.is_available():
        raise CommandError(
            "bench: needs an NVIDIA GPU that torch sees; --from FILE shows an earlier result without one"
        )
    consumers = chosen_consumers(options.consumers)
    from moe_conformance.bench.measure import run_bench

    log = Console(stderr=True, highlight=False, soft_wrap=True)
    command = shlex.join(["moe-conformance", *sys.argv[1:]])
    return run_bench(
        consumers,
        grid.points(),
        command,
        lambda found: log.print(row_line(found), markup=False),
        lambda partial: _save(json, partial),
    )


def chosen_consumers(names: tuple[str, ...]) -> dict[str, Consumer]:
    """The consumers named, or every installed one that declares cuda; raises CommandError."""
    try:
        if names:
            return {name: load_consumer(name) for name in names}
        found = {name: load_backend(name).consumer for name in installed_backends()}
    except (BackendNotFoundError, PlugInError) as error:
        raise CommandError(str(error)) from error
    return {
        name: consumer
        for name, consumer in found.items()
        if consumer is not None and "cuda" in consumer.declaration.devices and _is_fast(consumer)
    }


def _is_fast(consumer: Consumer) -> bool:
    """The reference tails run on a GPU too, but are written to be read: whoever wants their times names them."""
    from moe_contract import SoloConsumer

    return isinstance(consumer, SoloConsumer)


def parse_grid(options: BenchOptions) -> Grid:
    """The grid of the options; raises CommandError."""
    given: dict[str, Any] = {
        "tokens": _numbers("--tokens", options.tokens),
        "hidden_sizes": _numbers("--hidden", options.hidden),
        "top_ks": _numbers("--top-k", options.top_k),
        "ranks": _numbers("--tp", options.tp),
        "dtypes": _words("--dtype", options.dtypes, DTYPES),
        "modes": _words("--mode", options.modes, [mode.value for mode in Mode]),
        "caches": _words("--cache", options.caches, [cache.value for cache in Cache]),
    }
    given["modes"] = given["modes"] and tuple(map(Mode, given["modes"]))
    given["caches"] = given["caches"] and tuple(map(Cache, given["caches"]))
    grid = Grid(**{name: values for name, values in given.items() if values is not None})
    if not grid.points():
        raise CommandError("bench: one rank is timed in solo mode only; add solo to --mode, or ranks to --tp")
    return grid


def read_result(source: str) -> BenchResult:
    """The result of an earlier run; raises CommandError for what is none."""
    from moe_conformance.schemas import read_file

    try:
        return read_file(BenchResult, Path(source), "bench --json")
    except OSError as error:
        raise CommandError(f"--from: cannot read {source}: {error.strerror}") from error
    except ValueError as error:
        raise CommandError(f"--from: {error}") from error


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= LARGEST for part in parts):
        raise CommandError(f"{option}: expected numbers from 1 to {LARGEST} such as 1,16,128, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def _words(option: str, text: str | None, known: Sequence[str]) -> tuple[str, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in known:
            raise unknown(option.removeprefix("--"), part, known)
    return tuple(dict.fromkeys(parts))


def _document(text: str | None) -> Path | None:
    """A file whose sections can be replaced, before an hour of timing is spent on it; raises CommandError."""
    path = parse_file("--document", text)
    if path is not None:
        try:
            replaced(path.read_text(encoding="utf-8"), dict.fromkeys(SECTIONS, ""))
        except OSError as error:
            raise CommandError(f"--document: cannot read {text}: {error.strerror}") from error
        except ValueError as error:
            raise CommandError(f"--document: {text}: {error}") from error
    return path


def _require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise CommandError("--plot: needs matplotlib: pip install 'moe-conformance[plot]'")
