"""The terminal view: what is counted, and that it fits."""

from __future__ import annotations

import io
from typing import Any

import pytest

from moe_conformance.report.matrix import legend
from moe_conformance.report.model import BackendRecord, CaseResult
from moe_conformance.report.terminal import make_console, print_report
from moe_conformance.verdicts import Verdict
from moe_contract.clauses import families

from .report_factory import failure, printed, report_of, result


def every_family(**fields: Any) -> list[CaseResult]:
    """One passed case of each family."""
    return [result(f"{family}-1", **fields) for family in families()]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_report_keeps_to_the_width_but_for_commands_to_copy(width: int) -> None:
    """No line is folded by the terminal, however long the names are."""
    long = "acme_kernels.experimental.tails:fused_all_reduce_rms_norm"
    cases = [*every_family(consumer=long), *every_family(producer="reference-route-major", consumer=long)]
    cases += [failure(consumer=long), result("CAP-1", Verdict.UNSUPPORTED, reason=f"{long} declares no limit")]
    text = printed(report_of(*cases), width=width)
    lines = [line for line in text.splitlines() if not line.strip().startswith("reproduce")]
    assert all(len(line) <= width for line in lines if long not in line)


def test_matrix_counts_a_failure_under_the_clause_it_is_blamed_on() -> None:
    """A NUM-1 case that MAP-4 explains shows in the MAP column."""
    text = printed(report_of(failure("NUM-1"), result("NUM-1", number=1)), width=120)
    (row,) = [line for line in text.splitlines() if line.startswith("acme-tail")]
    assert row.split() == ["acme-tail", "F1", "1"]


def test_legend_names_the_letters_that_occur() -> None:
    """And no other."""
    assert legend([result(), result(verdict=Verdict.UNSUPPORTED)]) == "n passed, u unsupported"


def test_last_line_says_how_it_ended() -> None:
    """Counts, closest bound and where, time, profile, exit status."""
    near = result("NUM-1", headroom=0.93)
    last = printed(report_of(near, result(number=1)), width=200).splitlines()[-1]
    assert last == (
        "PASSED  2 pass; largest error/bound 0.93 (NUM-1 acme-tail T=17 K=8 H=2048 tp=2 bf16); 1.5 s; "
        "profile smoke on cpu; exit status 0"
    )


def test_case_that_did_not_run_makes_the_report_partial() -> None:
    """A pass and a case without an outcome are exit status 2, and the last line says why; a failure stays 1."""
    left_out = result("RED-1", Verdict.NOT_RUN, number=1, reason="given up after 3 crashes")
    report = report_of(result(), left_out)
    assert report.exit_status == 2
    assert "PARTIAL cases were not run, so this report is partial; 1 pass, 1 not-run" in " ".join(
        printed(report).split()
    )
    assert report_of(failure(), left_out).exit_status == 1
    assert report_of(left_out).exit_status == 3
    assert report_of(result(), result(number=1)).exit_status == 0


def test_partial_report_and_suite_error_are_said() -> None:
    """Neither can be taken for a pass."""
    text = printed(report_of(result(), complete=False, suite_errors=("collecting test_map.py failed: x",)))
    assert "SUITE ERROR  collecting test_map.py failed: x" in text
    assert "stopped, so this report is partial" in text and "exit status 2" in text


def test_backends_that_cannot_run_are_listed_with_the_reason() -> None:
    """And a run of nothing else has exit status 3."""
    absent = BackendRecord(name="acme", side="producer", not_run_reason="declares no support for device cpu")
    text = printed(report_of(backends=(absent,)))
    assert "producer acme: declares no support for device cpu" in text and "exit status 3" in text


def test_reasons_are_counted_over_backends() -> None:
    """The same reason for two backends is one line."""
    cases = [
        result(verdict=Verdict.UNSUPPORTED, consumer=name, reason=f"{name} declares no support for weight_bias")
        for name in ("a", "b")
    ]
    assert "    2  declares no support for weight_bias (2 backends or pairs)" in printed(report_of(*cases))


def test_quiet_leaves_failures_and_the_last_line() -> None:
    """-q has no matrix."""
    text = printed(report_of(failure(), result()), verbosity=-1)
    assert text.startswith("FAIL") and "cells:" not in text and "exit status 1" in text


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR on a terminal: no colour codes."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    for variable, coloured in ((None, True), ("1", False)):
        monkeypatch.delenv("NO_COLOR", raising=False)
        if variable:
            monkeypatch.setenv("NO_COLOR", variable)
        file = Terminal()
        print_report(report_of(failure()), make_console(file))
        assert ("\x1b[1;31m" in file.getvalue()) is coloured
