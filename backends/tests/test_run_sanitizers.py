"""The command that runs NVIDIA's tools: what counts as clean, with a stand-in for the tool."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("run_sanitizers.py")
CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "========= ERROR SUMMARY: 0 errors",
}
PASSED = "3 passed, 2 deselected in 1.00s"


@pytest.fixture
def complaint() -> object:
    """The function that judges a finished tool."""
    from .run_sanitizers import complaint

    return complaint


@pytest.mark.parametrize("tool", CLEAN)
def test_clean_is_passed_tests_and_a_clean_summary(tool: str, complaint) -> None:  # type: ignore[no-untyped-def]
    """Nothing else."""
    assert complaint(tool, 0, f"========= COMPUTE-SANITIZER\n{PASSED}\n{CLEAN[tool]}\n") is None


@pytest.mark.parametrize("tool", CLEAN)
@pytest.mark.parametrize(("status", "output", "reason"), [
    (None, f"{PASSED}\n{{clean}}", "did not end in time"),
    (1, f"{PASSED}\n{{clean}}", "exit status 1"),
    (0, f"{PASSED}\n", "printed no line"),
    (0, f"{PASSED}\n========= ERROR SUMMARY: 10 errors", "printed no line"),
    (0, f"{PASSED}\n========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", "printed no line"),
    (0, "5 skipped in 1.00s\n{clean}", "did not all run"),
    (0, "3 passed, 1 skipped in 1.00s\n{clean}", "did not all run"),
    (0, "30 deselected in 1.00s\n{clean}", "did not all run"),
    (0, "{clean}", "did not all run"),
    (0, f"========= Warning: could not track this launch\n{PASSED}\n{{clean}}", "says: Warning: could not track"),
    (0, f"========= Internal Sanitizer Error: no memory\n{PASSED}\n{{clean}}", "says: Internal Sanitizer Error"),
])  # fmt: skip
def test_anything_else_is_not_clean(  # type: ignore[no-untyped-def]
    tool: str, status: int | None, output: str, reason: str, complaint
) -> None:
    """A tool that fails, is stopped, says nothing or says that it did not look is no clean one."""
    assert reason in complaint(tool, status, output.format(clean=CLEAN[tool]))


def run(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with a PATH."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"PATH": path, "CUDA_HOME": "/no/such/folder"},
    )  # fmt: skip


def test_dry_run_prints_each_tool_and_runs_none() -> None:
    """One command a line; racecheck leaves out clusters and kernels that wait for each other."""
    done = run("", "--dry-run")
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and [line.split()[2] for line in lines] == ["memcheck", "synccheck", "racecheck"]
    assert all("--error-exitcode 1" in line and "kernel_substring=_tail" in line for line in lines)
    assert "alone and block" in lines[2]


def test_unknown_tool_is_refused() -> None:
    """Exit status 2, the known ones named."""
    done = run("", "leakcheck")
    assert done.returncode == 2 and "known: memcheck" in done.stderr


def test_a_program_past_its_limit_is_ended_with_what_it_started(tmp_path: Path) -> None:
    """None as its status; what it printed is kept, and its child is gone."""
    from .run_sanitizers import run

    mark = tmp_path / "mark"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(mark)!r}).touch()"
    code = f"import subprocess, sys; print('begun', flush=True); subprocess.run([sys.executable, '-c', {child!r}])"
    assert run([sys.executable, "-c", code], 1.0) == (None, "begun\n")
    time.sleep(2)
    assert not mark.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_skipped_tests_are_no_clean_run(tmp_path: Path) -> None:
    """Exit status 2 where the tests do not run by themselves; the tool is not started."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    tool.chmod(0o755)
    done = run(str(tmp_path), "synccheck")
    assert done.returncode == 2 and "do not pass by themselves" in done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.skipif(Path("/usr/local/cuda/bin/compute-sanitizer").exists(), reason="the tool is installed here")
def test_without_the_tool_it_says_so() -> None:
    """Exit status 2 and one line."""
    done = run("")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "compute-sanitizer not found" in done.stderr


def test_selected_tests_exist() -> None:
    """Each tool's selection collects tests, racecheck's no cluster and no exchange."""
    from .run_sanitizers import SELECTED, TESTS

    for tool, selected in SELECTED.items():
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-k", selected]
        found = subprocess.run([*command, str(TESTS)], capture_output=True, text=True, check=False).stdout
        names = [line for line in found.splitlines() if "::" in line]
        assert names
        if tool == "racecheck":
            assert not [name for name in names if "cluster" in name or "pair" in name or "exchange" in name]
        else:
            assert len(names) == 20
