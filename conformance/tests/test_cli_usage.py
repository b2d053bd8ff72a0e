"""The command line without a run: what is listed and explained, and what is refused with one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_conformance.cases.models import models
from moe_conformance.cli.app import invoke
from moe_conformance.cli.selection import SelectionOptions, select
from moe_contract.clauses import registry

from .wrong_plugins import write_wrong_plugins


@pytest.fixture(autouse=True)
def current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and output as a narrow terminal gets it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "--profile", "smok"], "unknown profile 'smok'; did you mean 'smoke'?"),
        (["run", "--profile", "model:qwen3-30b"], "did you mean 'qwen3-30b-a3b'?"),
        (["run", "--clause", "MOP-4"], "unknown clause 'MOP-4'; did you mean 'MAP-4'?"),
        (["run", "--consumer", "referenc"], "unknown backend 'referenc'; did you mean 'reference'?"),
        (["run", "--producer", "reference-a"], "backend 'reference-a' has no producer, only a consumer"),
        (["run", "--consumer", "absent_module:it"], "could not be imported: ModuleNotFoundError"),
        (["run", "--tp", "1,x"], "--tp: expected sizes from 1 to 64 such as 1,2,4, got '1,x'"),
        (["run", "--tp", "0"], "--tp: expected sizes from 1 to 64"),
        (["run", "--tp", ""], "--tp: expected sizes from 1 to 64"),
        (["run", "--device", "gpu"], "--device: expected cpu or cuda, got 'gpu'"),
        (["run", "--shard", "5/4"], "--shard: shard 5/4 does not exist"),
        (["run", "-n", "0"], "-n: expected auto or a number of worker processes from 1 to "),
        (["run", "-n", "many"], "got 'many'"),
        (["run", "--timeout", "-1"], "--timeout: expected seconds from 0.1"),
        (["run", "--timeout", "nan"], "--timeout: expected seconds from 0.1"),
        (["run", "--seed", "x"], "'--seed'"),
        (["run", "--porducer", "reference"], "--producer"),
        (["explain", "MAP-44"], "did you mean 'MAP-4'?"),
        (["explain"], "CLAUSE"),
        (["list", "backend"], "unknown list 'backend'; did you mean 'backends'?"),
        (["lst"], "'list'"),
        (["run", "--producer", ""], "unknown backend ''"),
        (["run", "--consumer", ""], "unknown backend ''"),
        (["run", "--profile", ""], "unknown profile ''"),
        (["run", "--profile", "SMOKE"], "unknown profile 'SMOKE'; did you mean 'smoke'?"),
        (["run", "--device", ""], "--device: expected cpu or cuda, got ''"),
        (["run", "--clause", ""], "unknown clause ''"),
        (["run", "--seed", ""], "'--seed'"),
        (["run", "--seed", "-1"], "--seed: expected a whole number from 0 to 4294967295, got -1"),
        (["run", "--seed", "99999999999999999999"], "--seed: expected a whole number from 0"),
        (["run", "-n", "1000000"], "-n: expected auto or a number of worker processes from 1 to "),
        (["run", "-n", ""], "-n: expected auto or a number of worker processes from 1 to "),
        (["run", "--shard", ""], "--shard: expected a shard such as 1/4, got ''"),
        (["run", "--report", ""], "--report: expected a folder such as report, or . for this one, got ''"),
        (["run", "--report", " "], "--report: expected a folder such as report, or . for this one, got ' '"),
        (["run", "--timeout", ""], "'--timeout'"),
        (["run", "--timeout", "1e-9"], "--timeout: expected seconds from 0.1 to 86400"),
        (["run", "--timeout", "1e30"], "--timeout: expected seconds from 0.1 to 86400"),
        (["explain", ""], "unknown clause ''"),
        (["list", ""], "unknown list ''"),
        (["list", "Backends"], "unknown list 'Backends'; did you mean 'backends'?"),
        (["list", "backends", "--profile", "smok"], "list backends takes no --profile: leave it out, or ask for list"),
        (["list", "backends", "--profile", ""], "list backends takes no --profile"),
        (["list", "backends", "--device", "gpu"], "--device: expected cpu or cuda, got 'gpu'"),
        (["list", "clauses", "--clause", "MAP-4"], "list clauses takes no --clause: moe-conformance explain MAP-4"),
        (["list", "models", "--seed", "0"], "list models takes no --seed"),
        (["list", "profiles", "--device", "cpu"], "list profiles takes no --device"),
        (["list", "clauses", "--tp", ""], "list clauses takes no --tp"),
        (["list", "backends", "--producer", "x"], "list backends takes no --producer"),
        (["list", "backends", "--consumer", ""], "list backends takes no --consumer"),
        (["list", "cases", "--profile", "smok"], "unknown profile 'smok'; did you mean 'smoke'?"),
        (["list", "cases", "--seed", "-1"], "--seed: expected a whole number"),
        (["list", "cases", "--clause", ""], "unknown clause ''"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_exit_status_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what was expected or what is nearest, on stderr, and nothing runs."""
    assert invoke(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("moe-conformance: ") and expected in line


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import absent_library", "ModuleNotFoundError: No module named 'absent_library'"),
        ("raise RuntimeError('first line\\nsecond line')", "RuntimeError: first line second line"),
        ("raise SystemExit(3)", "it ended the program (3)"),
        ("it = 5", "is a int; expected an object with 'declaration'"),
        ("def it(:", "SyntaxError"),
    ],
)
def test_backend_that_cannot_be_imported_is_one_line(
    source: str, expected: str, current_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever its module does."""
    module = f"broken_{abs(hash(source))}"  # a name of its own: modules stay imported
    (current_folder / f"{module}.py").write_text(source + "\n", encoding="utf-8")
    assert invoke(["run", "--consumer", f"{module}:it"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line


def test_misspelt_object_of_a_module_is_suggested(current_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a file's name is turned into that of its module."""
    write_wrong_plugins(current_folder)
    for wrong, expected in (("wrong:rihgt", "did you mean 'wrong:right'?"), ("wrong.py:right", "write wrong:right")):
        assert invoke(["run", "--consumer", wrong]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert expected in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--clause", "rows-6", "--consumer", "reference"],
            "no case of ROWS-6: it is a producer's clause, and only --consumer is given; add --producer NAME",
        ),
        (
            ["--clause", "NORM-1", "--producer", "reference"],
            "no case of NORM-1: it is a consumer's clause, and only --producer is given; add --consumer NAME",
        ),
        (
            ["--clause", "RED-6", "--consumer", "reference", "--tp", "1"],
            "no case of RED-6: it needs other tensor-parallel sizes than --tp 1; leave --tp out",
        ),
    ],
)  # fmt: skip
def test_clause_without_a_case_says_which_option_gives_it_one(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a run that has nothing else to do, and in the list of cases."""
    arguments = [*arguments, "--profile", "smoke", "--device", "cpu"]
    assert invoke(["run", *arguments]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert expected in out and "NOTHING RAN" in out
    assert invoke(["list", "cases", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and expected in captured.err


def test_clause_with_cases_and_one_whose_backend_cannot_run_here_get_no_note(
    current_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The options are not the reason."""
    write_wrong_plugins(current_folder)
    for consumer in ("reference", "wrong:gpu_only"):
        options = ["--consumer", consumer, "--clause", "norm-1", "--profile", "smoke", "--device", "cpu"]
        assert invoke(["list", "cases", *options]) == 0
        assert capsys.readouterr().err == ""


def test_clause_is_taken_in_any_case(capsys: pytest.CaptureFixture[str]) -> None:
    """By every command that takes one."""
    assert invoke(["explain", "map-4"]) == 0
    assert capsys.readouterr().out.startswith("MAP-4\n")
    options = ["--consumer", "reference", "--profile", "smoke", "--device", "cpu"]
    assert invoke(["list", "cases", "--clause", "Map-4", "--clause", "MAP-4", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and len(set(lines)) == len(lines) and all(line.startswith("MAP-4 ") for line in lines)


def test_cuda_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU job on a machine whose driver is missing must not be green."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert invoke(["run", "--device", "cuda"]) == 2
    assert "--device cuda: torch sees no GPU here" in capsys.readouterr().err


def test_unwritable_report_folder_is_refused_before_the_run(
    current_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after an hour of it."""
    (current_folder / "taken").write_text("")
    assert invoke(["run", "--profile", "smoke", "--report", "taken/report"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "cannot write to the report folder taken/report" in captured.err


def test_nothing_to_run_is_exit_status_3(current_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A backend for another device is listed with the reason and what it needs."""
    write_wrong_plugins(current_folder)
    assert invoke(["run", "--consumer", "wrong:gpu_only", "--device", "cpu", "--profile", "smoke"]) == 3
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "consumer wrong:gpu_only: declares no support for device cpu (declared: cuda); it needs an NVIDIA GPU" in text
    )
    assert "NOTHING RAN" in text


def test_explain_prints_what_the_registry_says_and_the_tests(capsys: pytest.CaptureFixture[str]) -> None:
    """Text, why, where to look, real cases, and the suite's tests of the clause."""
    assert invoke(["explain", "MAP-4"]) == 0
    out = capsys.readouterr().out
    flowing, clause = " ".join(out.split()), registry()["MAP-4"]
    for part in (clause.text, clause.why, clause.look_first, *clause.real_cases):
        assert part in flowing
    assert "test_map.py::" in out
    assert all(len(line) <= 80 for line in out.splitlines() if ".py::" not in line)  # names are there to be copied


def test_every_clause_can_be_explained_and_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    """No clause is without a test."""
    for clause in registry():
        assert invoke(["explain", clause]) == 0
        assert "none in this version" not in capsys.readouterr().out, clause


def test_lists_name_everything(capsys: pytest.CaptureFixture[str]) -> None:
    """Clauses, models, profiles and backends, by name at the beginning of a line."""

    def first_words(what: str) -> set[str]:
        assert invoke(["list", what]) == 0
        return {line.split()[0] for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")}

    assert first_words("clauses") == set(registry())
    assert first_words("models") == set(models())
    assert first_words("profiles") >= {"smoke", "core", "full"}
    assert "reference" in first_words("backends")


def test_listed_cases_are_those_that_the_options_select(capsys: pytest.CaptureFixture[str]) -> None:
    """A consumer named alone: its own tests, and pairs with the reference producer; no other backend's."""
    arguments = ["list", "cases", "--profile", "smoke", "--consumer", "reference-a", "--clause", "NUM-1", "--tp", "2"]
    assert invoke(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    backends = {line.partition("[")[2].partition(":")[0] for line in lines}
    assert backends == {"reference-a", "reference+reference-a"}
    assert all(line.startswith("NUM-1 ") and "-N2-" in line for line in lines)


def test_doctor_says_what_can_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Versions, GPU, compiler, and each backend."""
    assert invoke(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    labels = {line.split()[0] for line in lines if line and not line.startswith(" ")}
    assert {"suite", "python", "torch", "GPU", "nvcc", "flashinfer"} <= labels
    assert any(line.split() == ["consumer", "reference", "can", "run"] for line in lines)


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], []])
def test_help_does_not_import_torch(arguments: list[str]) -> None:
    """It is there at once."""
    code = "import sys, moe_conformance.cli.app as cli; cli.invoke(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 0, done.stderr
    assert "Usage: moe-conformance" in done.stdout + done.stderr


def test_internal_error_is_one_line_and_not_a_broken_clause(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2: 1 would say that a backend is wrong."""

    def broken(name: str) -> None:
        raise ZeroDivisionError("nothing to divide")

    monkeypatch.setattr("moe_conformance.cli.selection.get_profile", broken)
    assert invoke(["run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "internal error: ZeroDivisionError: nothing to divide (test_cli_usage.py:" in line
    monkeypatch.setenv("MOE_CONFORMANCE_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        invoke(["run"])


def test_smoke_takes_no_emulation_that_is_not_named() -> None:
    """An emulation is slow, so it takes part from core on; named, it runs in every profile."""

    def emulations(profile: str, *named: str) -> dict[str, str]:
        asked = SelectionOptions(named, (), profile, None, "cpu", (), 0)
        return {record.name: record.not_run_reason for record in select(asked).backends if record.emulated}

    left_out = emulations("smoke")
    assert left_out and all("profile smoke leaves out emulations; --producer" in why for why in left_out.values())
    assert not any(emulations("core").values())
    name = next(iter(left_out))
    assert emulations("smoke", name) == {name: ""}
