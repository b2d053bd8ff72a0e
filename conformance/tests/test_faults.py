"""The catalogue is complete, and faults are killed by the clause that they break: here the first of each clause and two
correct variants, all of them in ``moe-conformance faults`` (nox session faults)."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from moe_conformance.cli.app import invoke
from moe_conformance.cli.faults import select_faults
from moe_conformance.faults.catalogue import faults, variants
from moe_conformance.faults.execution import run_fault, run_variant
from moe_conformance.faults.kill_matrix import idle_tests
from moe_conformance.faults.known_bugs import KNOWN_BUGS, expressed
from moe_conformance.faults.model import CatalogueError, Fault, Planted, sentence_of
from moe_conformance.faults.plain_tail import PlainConsumer, PlainTail
from moe_conformance.faults.results import FaultResult, MatrixReport
from moe_conformance.faults.tests_without_fault import JUSTIFIED
from moe_conformance.plan import suite_tests
from moe_contract import get_clause
from moe_contract.clauses import registry

FEWEST = 2
"""Faults a clause has at least: one alone may be noticed by chance."""


@pytest.mark.parametrize("clause", registry())
def test_clause_has_two_faults(clause: str) -> None:
    """No clause of the registry is without two wrong backends that break it."""
    assert sum(fault.clause == clause for fault in faults().values()) >= FEWEST


@pytest.mark.parametrize("bug", KNOWN_BUGS)
def test_known_bug_is_expressed_by_a_fault(bug: str) -> None:
    """Every public report of the list is the report of at least one fault."""
    assert expressed(faults())[bug]


@pytest.mark.parametrize("fault", faults().values(), ids=faults())
def test_fault_is_described(fault: Fault) -> None:
    """A fault breaks a clause that exists and expresses reports that are in the list; its sentence ends."""
    assert get_clause(fault.clause).id == fault.clause
    assert set(fault.bugs) <= set(KNOWN_BUGS)
    assert fault.what.endswith(".")


FIRST_OF_CLAUSE = {fault.clause: fault for fault in reversed(faults().values())}
"""One fault of each clause: enough to see the machinery work, in a tenth of the time of all."""


@pytest.mark.parametrize("fault", FIRST_OF_CLAUSE.values(), ids=lambda fault: fault.id)
def test_fault_is_killed_by_its_own_clause(fault: Fault) -> None:
    """What the report says first of a fault is the clause that it breaks."""
    result = run_fault(fault)
    if result.verdict == "not-runnable":
        pytest.skip(result.reason)
    assert result.verdict == "killed", (result.blamed_first, result.blamed, result.killer)


@pytest.mark.parametrize("name", ["plain", "experts-in-reverse-order"])
def test_correct_variant_is_blamed_for_nothing(name: str) -> None:
    """Another order, layout, tile or profile is no fault; every headroom is at most 1, and cases did run."""
    result = run_variant(variants()[name])
    assert not result.false_alarms, result.false_alarms
    assert result.cases > 2 * result.unsupported
    assert result.headroom is not None and result.headroom <= 1.0


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("device-never-asked", "a result on the meta device"),
        ("refuses-without-a-reason", "UnsupportedError without a message"),
    ],
)
def test_unexplained_device_is_reported_as_what_came(name: str, got: str) -> None:
    """CAP-2 tells a result from a refusal that gives no reason."""
    killer = run_fault(faults()[name]).killer
    assert killer is not None and got in killer.message, killer


def test_fault_without_a_sentence_is_refused() -> None:
    """The docstring is what the matrix says of a fault."""

    class Wordless(PlainTail): ...

    Wordless.__doc__ = None
    with pytest.raises(CatalogueError, match="Wordless"):
        sentence_of(Wordless)


def test_correct_backend_as_a_fault_survives() -> None:
    """The matrix can say that a fault was not noticed: nothing is killed that is right."""
    planted = Planted(consumer=PlainConsumer(PlainTail))
    fault = Fault("none", "MAP-4", "Nothing is wrong.", "consumer", "", lambda: planted)
    result = run_fault(fault, escalate=False)
    assert result.verdict == "survived" and result.cases


def test_fault_under_another_clause_is_killed_by_other() -> None:
    """A fault that is filed under a clause that it does not break is told from one that is noticed rightly."""
    own = faults()["scale-twice"]
    filed = Fault("filed", "MAP-1", own.what, own.side, own.family, own.plant)
    result = run_fault(filed)
    assert (result.verdict, result.blamed_first) == ("killed-by-other", "SCALE-1")


def test_idle_tests_are_those_that_failed_for_no_fault() -> None:
    """A test is idle where no fault's failures name it."""
    busy = next(iter(suite_tests()))
    fault = FaultResult(
        id="x", clause="MAP-1", side="consumer", family="map", what="", verdict="killed", tests={busy: 1}
    )
    idle = idle_tests(MatrixReport(profile="smoke", faults=(fault,)))
    assert busy not in idle and len(idle) == len(suite_tests()) - 1


def test_justified_tests_exist() -> None:
    """A reason is kept only for a test that there is."""
    assert set(JUSTIFIED) <= set(suite_tests())


def test_clauses_and_ids_select_faults() -> None:
    """Both options narrow the catalogue; neither takes all of it."""
    assert select_faults((), ()) == list(faults())
    assert {faults()[name].clause for name in select_faults(("map-4",), ())} == {"MAP-4"}
    assert select_faults(("MAP-4",), ("last-row-read", "scale-twice")) == ["last-row-read"]


def test_command_writes_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One fault: exit status 0, a row in the terminal, and the JSON with verdict and killer."""
    file = tmp_path / "faults.json"
    assert invoke(["faults", "--fault", "last-row-read", "-n", "1", "--json", str(file)]) == 0
    assert "last-row-read" in capsys.readouterr().out
    (found,) = json.loads(file.read_text(encoding="utf-8"))["faults"]
    assert (found["id"], found["clause"], found["verdict"]) == ("last-row-read", "MAP-4", "killed")
    assert found["killer"]["clause"] == "MAP-4" and found["rules"]


@pytest.mark.parametrize(
    "arguments", [["--fault", "last-row"], ["--clause", "MAP-44"], ["--json", ""], ["-n", "none"]], ids=str
)
def test_command_refuses_what_it_does_not_know(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Wrong usage is one line and exit status 2, before anything runs."""
    assert invoke(["faults", *arguments]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_matrix_counts_and_exit_status() -> None:
    """0 only where all that could run is killed by its own clause; 3 where nothing could."""

    def report(*verdicts: str) -> MatrixReport:
        made = [
            FaultResult(id=str(n), clause="MAP-1", side="consumer", family="map", what="", verdict=verdict)  # type: ignore[arg-type]  # one of the four
            for n, verdict in enumerate(verdicts)
        ]
        return MatrixReport(profile="smoke", faults=tuple(made))

    statuses = {
        ("killed",): 0, ("killed", "not-runnable"): 0, ("killed", "survived"): 1, ("killed-by-other",): 1,
        ("not-runnable",): 3, (): 3,
    }  # fmt: skip
    for verdicts, status in statuses.items():
        assert report(*verdicts).exit_status == status, verdicts
        assert report(*verdicts).count("killed") == Counter(verdicts)["killed"]
