"""The terminal view: what is grouped, what is counted, and that it fits."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from moe_conformance.report.explain import explain_failures
from moe_conformance.report.failures import group_failures, reproduce
from moe_conformance.report.junit import junit_xml
from moe_conformance.report.matrix import legend
from moe_conformance.report.model import BackendRecord, CaseResult, Report, Selection
from moe_conformance.report.progress import LogProgress, TerminalProgress
from moe_conformance.report.terminal import make_console, print_report
from moe_conformance.report.writer import ReportFolderError, prepare_folder, write_report
from moe_conformance.verdicts import Verdict
from moe_contract import Violation
from moe_contract.clauses import families, registry

from .report_factory import ABSENT, failure, report_of, result

NARROW = 80


def printed(report: Report, *, width: int = NARROW, verbosity: int = 0) -> str:
    """The terminal view as text."""
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    print_report(report, console, verbosity=verbosity)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def every_family(**fields: Any) -> list[CaseResult]:
    """One passed case of each family."""
    return [result(f"{family}-1", **fields) for family in families()]


def test_failure_says_clause_backend_sizes_place_values_cause_and_what_to_do() -> None:
    """A failure reads as the documents show it."""
    text = printed(report_of(failure(number=3)))
    header, *rest = text.splitlines()
    assert header == "FAIL  MAP-4  consumer acme-tail  T=17 K=8 H=2048 tp=2 bf16 seed=3   rank 1,"
    assert rest[0] == "      token 16, column 40"
    assert "      residual_out: got 3.5  expected 2  bound 0.0078" in rest
    assert "      slot 5 is -1: the last row was read as this slot's row" in rest
    assert "      more: moe-conformance explain MAP-4" in rest
    command = "moe-conformance run --consumer acme-tail --clause MAP-4 --profile smoke"
    assert f"      reproduce: {command}" in rest
    flowing = " ".join(text.split())
    assert registry()["MAP-4"].text in flowing


def test_cases_that_fail_in_the_same_way_are_one_group() -> None:
    """Slot numbers and ranks in a hint do not split a group; another hint does."""
    other = ABSENT.model_copy(
        update={"hint": "slot 2 of rank 1 (and 3 more) is -1: the last row was read as this slot's row"}
    )
    different = ABSENT.model_copy(update={"hint": "a slot of -1 let its NaN weight reach the result"})
    groups = group_failures([failure(number=1), failure("NUM-1", other, 2), failure(violation=different, number=3)])
    assert [len(group.cases) for group in groups] == [2, 1]
    assert "2 cases end like this; by tested clause: MAP-4 1, NUM-1 1" in printed(report_of(*groups[0].cases))


def test_pair_that_fails_as_its_consumer_does_alone_is_the_same_group() -> None:
    """A consumer's fault is not told again for every producer it is paired with."""
    pairs = [failure("NUM-1", number=n, producer=name) for n, name in enumerate(("p", "q"))]
    (group,) = group_failures([*pairs, failure(number=7)])
    assert group.subject == "consumer acme-tail"
    text = " ".join(printed(report_of(*pairs, failure(number=7))).split())
    assert "3 cases end like this, 2 of them in pairs with p, q" in text


def test_errors_are_grouped_over_clauses_and_blame_none() -> None:
    """A crash is no clause's failure."""
    cases = [result(clause, Verdict.ERROR, reason="acme-tail raised KeyError: 'x'") for clause in ("MAP-4", "NUM-1")]
    (group,) = group_failures(cases)
    assert (group.clause, len(group.cases)) == ("", 2)
    assert "explain" not in printed(report_of(*cases))


def test_undiagnosed_composite_failure_is_explained_by_the_clause_its_backend_breaks() -> None:
    """A failed NUM-1 case with absent experts is counted under MAP-4 when the same consumer fails MAP-4's own test."""
    vague = Violation(clause="NUM-1", field="residual_out", got="1", expected="2")
    composite = failure("NUM-1", vague, case={"absent": "quarter", "ranks": 2})
    explained = explain_failures([composite, failure()])
    assert explained[0].explained_by == "MAP-4" and explained[0].blamed == "MAP-4"
    text = printed(report_of(*explained))
    assert "accounts for 1 failures of composite tests too: NUM-1 1" in text


@pytest.mark.parametrize(
    ("case", "own"),
    [({"absent": "none"}, failure()), ({"absent": "quarter"}, failure(consumer="another"))],
    ids=["without-the-feature", "another-backend"],
)
def test_failure_stays_unexplained_without_feature_or_by_another_backend(case: dict[str, str], own: CaseResult) -> None:
    """A clause accounts for a failure only on cases that exercise it and of the backend that breaks it."""
    vague = Violation(clause="NUM-1", field="residual_out", got="1", expected="2")
    composite = failure("NUM-1", vague, case=case)
    assert explain_failures([composite, own])[0].explained_by is None


def test_diagnosed_failure_is_not_explained_again() -> None:
    """What the diagnosis blames stays blamed."""
    diagnosed = failure("NUM-1", Violation(clause="SHARED-1", field="x", got="1", expected="2"), case={"absent": "all"})
    assert explain_failures([diagnosed, failure()])[0].blamed == "SHARED-1"


def test_reproduce_names_what_the_run_was_given() -> None:
    """Sizes, device and seed appear only where they were not the defaults; the clause is the test's own."""
    selection = Selection(
        profile="core", producers=(), consumers=(), ranks=(2, 4), ranks_given=True, device="cuda", seed=3
    )
    case = failure("NUM-1", producer="my module:it")
    expected = (
        "moe-conformance run --producer 'my module:it' --consumer acme-tail --clause NUM-1 --profile core "
        "--tp 2,4 --device cuda --seed 3"
    )
    assert reproduce(case, selection) == expected


def _sized(number: int, clause: str = "MAP-4", **fields: Any) -> CaseResult:
    """A failure blamed on MAP-4 with the sizes of a small consumer's case, but for ``fields``."""
    names = {"producer": fields.pop("producer", None)}
    sizes = {"tokens": 5, "ranks": 1, "top_k": 4, "hidden_size": 256, "dtype": "bfloat16", **fields}
    return failure(clause, number=number, case=sizes, **names)


@pytest.mark.parametrize(
    "harder",
    [
        {"tokens": 6},
        {"ranks": 2},
        {"top_k": 8},
        {"hidden_size": 512},
        {"absent": "quarter", "tokens": 1},
        {"producer": "p", "tokens": 1},
        {"clause": "NUM-1"},
        {"num_experts": 16, "intermediate_size": 32, "method": "deepseek-v3", "tokens": 1},
    ],
    ids=str,
)
def test_simplest_case_is_shown(harder: dict[str, Any]) -> None:
    """Whichever ran first: alone before in a pair, without variants, then few tokens, ranks, slots and columns."""
    simple = _sized(7)
    (group,) = group_failures([_sized(1, **harder), simple, _sized(2, **harder)])
    assert group.shown == simple


def test_commands_say_when_another_clauses_test_found_it() -> None:
    """The blamed clause is explained, and the clause whose test found it is run."""
    text = printed(report_of(failure("NUM-1")), width=200)
    assert "more: moe-conformance explain MAP-4\n" in text
    assert "reproduce (found by the test of NUM-1): moe-conformance run --consumer acme-tail --clause NUM-1 " in text


def test_reproduce_runs_both_clauses_where_one_accounts_for_the_other() -> None:
    """Without the blamed clause's own failure the case would be blamed on its own clause."""
    explained = failure("NUM-1", explained_by="SCALE-1")
    selection = Selection(profile="core", producers=(), consumers=(), ranks=(1,), timeout_s=2.5)
    assert reproduce(explained, selection) == (
        "moe-conformance run --consumer acme-tail --clause NUM-1 --clause SCALE-1 --profile core --timeout 2.5"
    )


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


def test_log_gets_a_line_for_each_tenth() -> None:
    """A hundred quick cases are nine lines after the first, the end being said by the report."""
    console = Console(file=io.StringIO(), width=NARROW)
    progress = LogProgress(console)
    progress.start(100)
    for number in range(100):
        progress.advance(result(number=number) if number else failure())
    progress.stop()
    assert isinstance(console.file, io.StringIO)
    first, *lines = console.file.getvalue().splitlines()
    assert first == "running 100 cases"
    assert [line[:4].strip() for line in lines] == [str(percent) for percent in range(10, 100, 10)]
    assert all(line.endswith("1 broken") for line in lines)


def test_bar_counts_to_the_end() -> None:
    """On a terminal the bar shows done and total, and counts what is broken."""
    console = Console(file=io.StringIO(), width=NARROW, force_terminal=True)
    progress = TerminalProgress(console)
    progress.start(2)
    progress.advance(failure())
    progress.advance(result())
    progress.stop()
    assert isinstance(console.file, io.StringIO)
    assert "2/2" in console.file.getvalue() and "1 broken" in console.file.getvalue()


def test_json_holds_the_whole_report(tmp_path: Path) -> None:
    """report.json reads back into an equal report."""
    report = report_of(failure(), result(number=1, headroom=0.5), suite_errors=("x",))
    write_report(report, tmp_path / "new" / "folder")
    text = (tmp_path / "new" / "folder" / "report.json").read_text(encoding="utf-8")
    assert Report.model_validate_json(text) == report


def test_report_is_replaced_whole(tmp_path: Path) -> None:
    """A second report replaces the first and leaves no temporary file."""
    write_report(report_of(failure()), tmp_path)
    write_report(report_of(result()), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["junit.xml", "report.json"]
    assert Report.model_validate_json((tmp_path / "report.json").read_text()).exit_status == 0


def test_folder_that_is_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    """Before anything runs."""
    (tmp_path / "taken").write_text("")
    with pytest.raises(ReportFolderError, match=r"cannot write to the report folder .*taken") as caught:
        prepare_folder(tmp_path / "taken")
    assert "\n" not in str(caught.value)


def test_junit_counts_and_marks_every_verdict() -> None:
    """Failures, errors and skips add up to what is not passed."""
    cases = [result(verdict=verdict, number=n, reason="why") for n, verdict in enumerate(Verdict)]
    suite = ElementTree.fromstring(junit_xml(report_of(*cases, suite_errors=("broken",)))).find("testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, "-1")) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": len(Verdict) + 1, "failures": 2, "errors": 3, "skipped": 3}
    skipped = [element.get("message") for element in suite.iter("skipped")]
    assert skipped == ["why"] * 3


def test_junit_survives_characters_that_xml_has_not() -> None:
    """A control character in a backend's message does not make the document unreadable."""
    dirty = result(verdict=Verdict.ERROR, reason="raised \x00\x1b[31m\ud800 <&> é")
    (error,) = ElementTree.fromstring(junit_xml(report_of(dirty))).iter("error")
    assert error.get("message") == "raised ??[31m? <&> é"


def test_junit_carries_clause_and_blamed_clause() -> None:
    """As properties, since JUnit has no field for them."""
    (element,) = ElementTree.fromstring(junit_xml(report_of(failure("NUM-1")))).iter("testcase")
    facts = {item.get("name"): item.get("value") for item in element.iter("property")}
    assert (facts["clause"], facts["blamed"], facts["verdict"]) == ("NUM-1", "MAP-4", "fail")
    assert element.get("classname") == "test_num_1.test_promise"
