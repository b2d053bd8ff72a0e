"""What the documents show of a bench: Markdown, goals and figure, each a view of one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_conformance.bench.goal_list import ELSEWHERE, GOALS, all_findings
from moe_conformance.bench.goals import Finding, Status
from moe_conformance.bench.markdown import SECTIONS, replaced, to_markdown
from moe_conformance.bench.model import BenchResult
from moe_conformance.bench.plot import digest
from moe_conformance.cli.app import invoke

from .bench_factory import bench_result, bench_row

ROOT = Path(__file__).parents[2]
MEASURED, DOCUMENT, FIGURE = (
    ROOT / name for name in ("benchmarks/results/h200/bench.json", "docs/cuda-consumer.md", "docs/cuda-consumer.svg")
)
needs_checkout = pytest.mark.skipif(not MEASURED.exists(), reason="the results are in the checkout alone")


def _seen(result: BenchResult, where: str, tokens: str, goal: str) -> tuple[str, Status]:
    (found,) = [
        each for each in all_findings(result) if (each.where, each.tokens) == (where, tokens) and goal in each.goal
    ]
    return found.seen, found.status


@needs_checkout
def test_documents_show_the_measured_file() -> None:
    """The command that docs/cuda-consumer.md gives would change neither its sections nor its figure."""
    result = BenchResult.model_validate_json(MEASURED.read_text(encoding="utf-8"))
    document = DOCUMENT.read_text(encoding="utf-8")
    assert replaced(document, to_markdown(result)) == document
    assert digest(result) in FIGURE.read_text(encoding="utf-8")


def test_one_command_writes_document_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And prints the same Markdown; what lies outside the markers stays, and a second time nothing changes."""
    pytest.importorskip("matplotlib")
    source, document, figure = (tmp_path / name for name in ("b.json", "d.md", "f.svg"))
    result = bench_result(
        bench_row("cuda", 4.0), bench_row("theirs", 8.0), bench_row("cuda", 5.0, 16), bench_row("theirs", 3.0, 16)
    )
    source.write_text(result.model_dump_json())
    document.write_text(
        "before\n" + "".join(f"<!-- bench:{n} -->\nOUTDATED\n<!-- /bench:{n} -->\n" for n in SECTIONS) + "after"
    )
    given = ["bench", "--from", str(source), "--markdown", "--document", str(document), "--plot", str(figure)]
    assert invoke(given) == 0
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after") and "OUTDATED" not in text
    assert "| 1 | **4.00** | 8.00 | 0.50 | 25% |" in text and "| 16 | 5.00 | **3.00** | 1.67 | 25% |" in text
    printed = capsys.readouterr().out
    assert all(section in printed and section in text for section in to_markdown(result).values())
    assert digest(result) in figure.read_text()
    assert invoke(given) == 0 and document.read_text() == text


@pytest.mark.parametrize("text", ["", "<!-- bench:tables -->", "<!-- /bench:tables --><!-- bench:tables -->"])
def test_a_document_without_its_markers_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, before anything is timed; the file stays as it is."""
    document = tmp_path / "d.md"
    document.write_text(text)
    assert invoke(["bench", "--document", str(document)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "<!-- bench:tables -->" in error
    assert document.read_text() == text


def test_tables_name_wrong_results_and_partial_runs() -> None:
    """Neither is shown as a time."""
    text = to_markdown(bench_result(bench_row("cuda", None), bench_row("theirs", 8.0), complete=False))["tables"]
    assert "| 1 | **WRONG** | **8.00** | - | - |" in text and "Partial" in text


def test_every_goal_is_listed_whatever_was_measured() -> None:
    """Met, missed or not measured: of an empty result all are unknown, and none is missing."""
    findings = all_findings(bench_result())
    assert len(findings) == len(GOALS) + 1 + len(ELSEWHERE)
    assert {each.status for each in findings} == {Status.UNKNOWN}
    many = [bench_row(name, us, t) for name, us in (("cuda", 9.0), ("flashinfer-fused", 8.0)) for t in (1, 64, 1024)]
    assert [_asked(each) for each in all_findings(bench_result(*many))] == [_asked(each) for each in findings]


def _asked(finding: Finding) -> tuple[str, str, str]:
    return finding.where, finding.tokens, finding.goal


def test_goals_are_met_at_their_bound_and_missed_beyond_it() -> None:
    """Ratios at most, speedups and shares at least."""
    at, past = (bench_result(bench_row("cuda", us), bench_row("flashinfer-fused", 10.0)) for us in (8.0, 8.01))
    assert _seen(at, "solo, cold, N=2", "1", "flashinfer-fused") == ("0.80", Status.MET)
    assert _seen(past, "solo, cold, N=2", "1", "flashinfer-fused") == ("0.80", Status.MISSED)
    for us, status in ((5.0, Status.MET), (5.1, Status.MISSED)):
        found = bench_result(bench_row("cuda", us, 64), bench_row("triton-split", 9.0, 64))
        assert _seen(found, "solo, cold, N=2", "64", "triton-split")[1] is status


def test_the_worst_of_several_sizes_counts_and_names_them() -> None:
    """A range of token counts is not met by its best."""
    rows = [bench_row("cuda", us, t) for t, us in ((2048, 20.0), (4096, 50.0))]
    rivals = [bench_row("flashinfer-fused", 100.0, t) for t in (2048, 4096)]
    seen = _seen(bench_result(*rows, *rivals), "solo, cold, N=2", "from 1025", "flashinfer-fused")
    assert seen == ("0.50 at T=4096, the worst of 2048, 4096", Status.MISSED)


def test_exchange_counts_three_tensors_a_peer() -> None:
    """At N=2 and K=8, 15 tensors instead of 12; 4 TB/s is the copy."""
    us = 12 * 7168 * 2 * 1024 / 3e6  # effective bytes at 3 TB/s
    result = bench_result(bench_row("cuda", us, 1024))
    assert _seen(result, "solo, cold, N=2", "1024", "effective bytes") == ("75%", Status.MET)
    assert _seen(result, "solo, cold, N=2", "1024", "exchange counted") == ("94%", Status.MET)


def test_linear_cost_needs_both_ends() -> None:
    """Time per token from 1024 to 16384; any size between may be the worst."""
    ends = [bench_row("cuda", 10.24, 1024), bench_row("cuda", 163.84, 16384)]
    where = ("solo, cold, N=2", "16384", "spread")
    assert _seen(bench_result(ends[1]), *where)[1] is Status.UNKNOWN
    assert _seen(bench_result(*ends), *where) == ("1.00", Status.MET)
    assert _seen(bench_result(*ends, bench_row("cuda", 46.0, 4096)), *where) == ("1.12", Status.MISSED)


def test_another_top_k_or_dtype_answers_no_goal() -> None:
    """The goals are set for K=8 and bfloat16."""
    for fields in ({"top_k": 4}, {"dtype": "float16"}):
        rows = [bench_row(name, 1.0, **fields) for name in ("cuda", "flashinfer-fused")]
        assert {each.status for each in all_findings(bench_result(*rows))} == {Status.UNKNOWN}


def test_host_cost_and_empty_nodes_are_compared() -> None:
    """Neither comes from a ratio of rows."""
    result = bench_result(bench_row("cuda", 3.1, cache="warm"), host_call_us={"cuda": 9.9})
    assert _seen(result, "eager call, N=1", "1", "host") == ("9.9", Status.MET)
    assert _seen(result, "solo, warm, N=2", "1", "empty graph nodes") == ("6.20", Status.MISSED)
