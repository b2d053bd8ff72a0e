"""The bench's parts that need no GPU: its options, its points, its rows, and its views."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from moe_conformance.bench.grid import Grid
from moe_conformance.bench.model import Cache, Mode, Skipped, with_ratios
from moe_conformance.bench.table import print_result
from moe_conformance.bench.timing import percentile
from moe_conformance.cli.app import invoke

from .bench_factory import bench_result, bench_row

_result = partial(bench_result, empty_node_us=0.7, host_call_us={"ours": 9.0})


def test_ratio_compares_with_the_best_other_consumer_at_the_same_point() -> None:
    """Slower and faster ones at the point count, other sizes do not, nor does the same kernel launched otherwise."""
    rows = with_ratios(
        [
            bench_row("a", 4.0),
            bench_row("a-pdl", 1.0),
            bench_row("b", 8.0),
            bench_row("c", 5.0),
            bench_row("b", 1.0, tokens=16),
        ]
    )
    assert [row.ratio_to_best for row in rows] == [0.8, 0.2, 8.0, 5.0, None]


def test_a_wrong_result_has_no_time() -> None:
    """A row that says wrong and carries a median, or right and carries none, cannot be made."""
    assert bench_row("a", None).median_us is None
    for correct, median in ((False, 4.0), (True, None)):
        with pytest.raises(ValidationError, match="a correct row has a median"):
            bench_row("a", median, correct=correct)


def test_effective_bytes_are_those_of_the_rows_and_five_tensors() -> None:
    """K rows, shared and residual read, residual and norm written: 12 x 7168 x 2 bytes a token at K = 8."""
    assert bench_row("a", 1.0, tokens=3).effective_bytes == 3 * 12 * 7168 * 2


def test_one_rank_is_timed_in_solo_mode_only() -> None:
    """A rank without peers has no chain and no join; two ranks have all three, cold and warm."""
    points = Grid(tokens=(1,), ranks=(1, 2)).points()
    found = [(point.ranks, point.mode, point.cache) for point in points]
    both = list(Cache)
    assert found == [(1, Mode.SOLO, c) for c in both] + [(2, mode, c) for mode in Mode for c in both]


def test_percentiles_are_values_that_were_measured() -> None:
    """By the nearest rank."""
    times = [float(number) for number in range(11)]
    assert [percentile(times, share) for share in (0.0, 0.1, 0.5, 0.9, 1.0)] == [0.0, 1.0, 5.0, 9.0, 10.0]
    assert percentile([3.0], 0.9) == 3.0


def test_result_survives_its_file_and_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--from`` prints the rows of a file that ``--json`` wrote, without a GPU."""
    result = _result(bench_row("ours", 4.0), bench_row("theirs", 8.0), bench_row("broken", None))
    file = tmp_path / "bench.json"
    file.write_text(result.model_dump_json())
    assert invoke(["bench", "--from", str(file)]) == 1  # one of its rows is wrong
    shown = capsys.readouterr().out
    assert "WRONG" in shown and "0.50" in shown and "2.00" in shown and "9.0 us" in shown


@pytest.mark.parametrize("change", [{"schema_version": 2}, {"rows": [{"consumer": "a"}]}, {"unknown": 1}])
def test_a_file_of_another_schema_is_refused(
    change: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the file and the field."""
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(_result(bench_row("a", 1.0)).model_dump(mode="json") | change))
    assert invoke(["bench", "--from", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and str(file) in error and next(iter(change)) in error


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--mode", "sol"], "did you mean 'solo'"),
        (["--cache", "hot"], "known: cold, warm"),
        (["--tokens", "0"], "--tokens: expected numbers from 1"),
        (["--tp", ""], "--tp: expected numbers"),
        (["--tp", "1", "--mode", "join"], "one rank is timed in solo mode only"),
        (["--json", "/no/such/folder/x.json"], "--json: expected a file in a folder that exists"),
        (["--json", ""], "--json: expected a file"),
        (["--from", "/no/such/file"], "cannot read"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, nothing on stdout."""
    assert invoke(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_table_says_what_was_not_timed_and_that_it_is_partial() -> None:
    """Each reason once, with its count."""
    skipped = tuple(Skipped(consumer="x", point=str(n), reason="no such hardware") for n in range(3))
    console = Console(record=True, width=120, quiet=False, file=None)
    print_result(_result(bench_row("ours", 4.0), skipped=skipped, complete=False), console)
    text = console.export_text()
    assert "not timed: x at 3 points: no such hardware" in text and "PARTIAL" in text


def test_plot_draws_every_consumer_and_the_copy_limit(tmp_path: Path) -> None:
    """One panel, a line each; the same rows give the same bytes."""
    pytest.importorskip("matplotlib")
    from moe_conformance.bench.plot import draw

    rows = [
        bench_row(name, us * tokens, tokens=tokens)
        for name, us in (("ours", 4.0), ("theirs", 8.0))
        for tokens in (1, 16)
    ]
    draw(_result(*rows), tmp_path / "a.svg")
    draw(_result(*rows), tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert (tmp_path / "a.svg").read_text().count('<g id="line2d_') > 3
