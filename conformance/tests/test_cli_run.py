"""Real runs of the command line on wrong backends: every one gets its verdict, and the report survives."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

from moe_conformance.report.model import CaseResult, Report
from moe_conformance.runner.given_up import MOST_STRIKES
from moe_conformance.verdicts import Verdict

from .wrong_plugins import write_wrong_plugins

LONGEST_S = 300.0
"""Of a run that takes half a minute alone; a machine that runs other tests beside it is slower."""


@dataclass(frozen=True)
class Ended:
    """A finished run."""

    status: int
    out: str
    err: str
    report: Report
    folder: Path

    def of(self, consumer: str) -> list[CaseResult]:
        """The results of one consumer of the module of wrong ones."""
        return [case for case in self.report.cases if case.consumer == f"wrong:{consumer}"]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own, with settings around it that must not matter."""
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n", encoding="utf-8")
    (folder / "conftest.py").write_text(
        "raise RuntimeError('the conftest of the current folder ran')\n", encoding="utf-8"
    )
    write_wrong_plugins(folder)
    command = [sys.executable, "-m", "moe_conformance", "run", "--profile", "smoke", "--device", "cpu", *arguments]
    environment = {**os.environ, "PYTEST_ADDOPTS": "--no-such-option", "COLUMNS": "80"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen[str], folder: Path) -> Ended:
    """Waits for it and reads its report."""
    out, err = process.communicate(timeout=LONGEST_S)
    text = (folder / "report.json").read_text(encoding="utf-8")
    return Ended(process.returncode, out, err, Report.model_validate_json(text), folder)


WRONG = ("right", "last_row", "raises", "nonsense", "leaves", "garbles", "sleeps", "holds", "exits", "segfaults")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """One run of all wrong consumers beside the right one."""
    folder = tmp_path_factory.mktemp("mixed")
    named = [part for name in WRONG for part in ("--consumer", f"wrong:{name}")]
    clauses = ["--clause", "MAP-4", "--tp", "1", "--timeout", "1", "-n", "2", "--report", str(folder / "report")]
    yield finish(start(folder, *named, *clauses), folder / "report")


def test_broken_clause_is_exit_status_1(mixed: Ended) -> None:
    """Whatever else crashed, and with nothing on stderr."""
    assert mixed.status == mixed.report.exit_status == 1, mixed.out
    assert mixed.err == ""


def test_right_backend_passes_beside_wrong_ones(mixed: Ended) -> None:
    """Nobody else's crash or hang costs it a case."""
    verdicts = {case.verdict for case in mixed.of("right")}
    assert Verdict.PASS in verdicts and verdicts <= {Verdict.PASS, Verdict.UNSUPPORTED}


def test_wrong_result_is_blamed_with_its_cause(mixed: Ended) -> None:
    """The last row read for a slot of -1 is MAP-4, and the terminal says so."""
    failed = [case for case in mixed.of("last_row") if case.verdict is Verdict.FAIL]
    assert failed and {case.blamed for case in failed} == {"MAP-4"}
    assert "FAIL  MAP-4  consumer wrong:last_row" in mixed.out
    assert "the last row was read as this slot's" in " ".join(mixed.out.split())


@pytest.mark.parametrize(
    ("consumer", "reason"),
    [
        ("raises", "wrong:raises raised KeyError: 'no such buffer' (wrong.py:"),
        ("leaves", "wrong:leaves raised SystemExit: 3 (wrong.py:"),
        ("garbles", r"wrong:garbles raised RuntimeError: bad \udcff\x1b[31m (wrong.py:"),
        ("nonsense", "wrong:nonsense returned str, expected moe_contract.TailOutput"),
        ("sleeps", "wrong:sleeps hangs: no result after 1 s"),
        ("holds", "wrong:holds hangs: no result after"),
        ("exits", "wrong:exits crashed: its worker process ended (exit status 7)"),
        ("segfaults", "wrong:segfaults crashed: its worker process ended (signal SIGSEGV)"),
    ],
)
def test_crash_and_hang_are_errors_with_one_clear_line(mixed: Ended, consumer: str, reason: str) -> None:
    """Of the backend, not of the suite; no traceback reaches the terminal."""
    errors = [case for case in mixed.of(consumer) if case.verdict is Verdict.ERROR]
    assert errors
    for case in errors:
        assert case.reason.startswith(reason) and not case.suite_error
    assert not any(case.verdict is Verdict.PASS for case in mixed.of(consumer))
    assert "Traceback" not in mixed.out


@pytest.mark.parametrize("consumer", ["holds", "exits", "segfaults", "sleeps"])
def test_backend_that_goes_on_crashing_is_given_up_with_the_reason(mixed: Ended, consumer: str) -> None:
    """Its other cases are not run, and say why; two workers may each be one case ahead."""
    cases = mixed.of(consumer)
    errors = [case for case in cases if case.verdict is Verdict.ERROR]
    assert MOST_STRIKES <= len(errors) <= MOST_STRIKES + 2
    left_out = [case for case in cases if case.verdict is Verdict.NOT_RUN]
    assert left_out and all("had crashed or hung" in case.reason for case in left_out)


def test_every_planned_case_has_a_result(mixed: Ended) -> None:
    """Each id of the manifest once, and no other."""
    assert mixed.report.suite_errors == ()
    assert [case.id for case in mixed.report.cases] == list(mixed.report.manifest)
    assert mixed.report.complete


def test_junit_agrees_with_the_report(mixed: Ended) -> None:
    """As many test cases, failures and errors."""
    suite = ElementTree.parse(mixed.folder / "junit.xml").getroot().find("testsuite")
    assert suite is not None
    counts = mixed.report.count()
    assert suite.get("tests") == str(len(mixed.report.cases)) == str(len(list(suite.iter("testcase"))))
    assert suite.get("failures") == str(counts[Verdict.FAIL])
    assert suite.get("errors") == str(counts[Verdict.ERROR])


def test_right_consumer_is_exit_status_0_and_shards_share_the_work(tmp_path: Path) -> None:
    """Two shards run different cases, together all of them."""
    arguments = ["--consumer", "wrong:right", "--clause", "SHARED-1", "--clause", "RED-3"]
    runs = [start(tmp_path, *arguments, "--shard", f"{i}/2", "--report", f"part{i}", "-q") for i in (1, 2)]
    parts = [finish(run, tmp_path / f"part{number}") for number, run in enumerate(runs, 1)]
    whole = subprocess.run(
        [sys.executable, "-m", "moe_conformance", "list", "cases", "--profile", "smoke", "--device", "cpu", *arguments],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    ran = [case.id for part in parts for case in part.report.cases]
    assert sorted(ran) == sorted(line.split(maxsplit=1)[1] for line in whole)
    for part in parts:
        assert part.report.cases and part.status == 0, part.out
        assert len(part.out.splitlines()) <= 3  # -q: the last line, folded


KILLED_AT_SEND = """
import time
from xdist.workermanage import WorkerController
from moe_conformance.plan import PlanRequest
from moe_conformance.runner import run

commands, original = [], WorkerController.sendcommand

def send(self, name, **arguments):
    commands.append(name)
    if commands.count("runtests") == 2 and name == "runtests":
        self.gateway._io.popen.kill()
        self.gateway._io.popen.wait()
        time.sleep(0.5)  # until the pipe's end is noticed
    original(self, name, **arguments)

WorkerController.sendcommand = send
request = PlanRequest(consumers=("wrong:right",), profile="smoke", clauses=("MAP-4", "SHARED-1"), ranks=(1,))
print(run(request, workers=2).model_dump_json())
"""


def test_worker_that_dies_while_it_is_sent_cases_costs_only_one_case(tmp_path: Path) -> None:
    """As when two workers crash at once: the controller has not yet learnt of one's death and sends it more."""
    write_wrong_plugins(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", KILLED_AT_SEND], cwd=tmp_path, capture_output=True, text=True, timeout=LONGEST_S
    )
    assert done.returncode == 0, done.stderr
    report = Report.model_validate_json(done.stdout)
    counts = report.count()
    assert report.suite_errors == () and counts[Verdict.NOT_RUN] == 0
    assert counts[Verdict.ERROR] == 1 and counts[Verdict.PASS] > 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_stopped_run_reports_what_there_is(tmp_path: Path, number: signal.Signals) -> None:
    """The report is written, is marked as partial, and does not look like a pass."""
    named = ["--consumer", "wrong:right", "--consumer", "wrong:sleeps", "--clause", "RED-3", "--tp", "1"]
    with _interrupts_heeded():
        process = start(tmp_path, *named, "--timeout", "600", "-n", "1", "--report", "report")
    assert process.stdout is not None
    assert process.stdout.readline() == "running 4 cases\n"
    _wait_for_worker(process.pid)
    process.send_signal(number)
    ended = finish(process, tmp_path / "report")
    assert ended.status == ended.report.exit_status != 0
    assert not ended.report.complete
    assert "stopped, so this report is partial" in " ".join(ended.out.split())
    stopped = [case for case in ended.of("sleeps") if case.verdict is Verdict.NOT_RUN]
    assert stopped and all("the run was stopped" in case.reason for case in stopped)


@contextmanager
def _interrupts_heeded() -> Iterator[None]:
    """A process started here heeds SIGINT: one inherits that it is ignored, as in what a shell runs with ``&``."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _wait_for_worker(pid: int) -> None:
    """Until the controller has a worker process, so that the signal comes in the middle of the run."""
    children = Path(f"/proc/{pid}/task/{pid}/children")
    until = time.monotonic() + LONGEST_S
    while not children.read_text().split():
        assert time.monotonic() < until
        time.sleep(0.1)
    time.sleep(1.0)
