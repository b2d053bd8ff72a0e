"""The command under a failure gives that failure again."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from moe_conformance.report.failures import FailureGroup, group_failures
from moe_conformance.report.model import Report

from .wrong_plugins import write_wrong_plugins

WRONG = ("last_row", "norm_too_wide", "raises")
COMMAND = re.compile(r"^ +reproduce(?: \(found by the test of (?P<clause>[A-Z]+-\d+)\))?: (?P<command>.+)$")
LONGEST_S = 300.0
"""Of a run that takes ten seconds alone."""


def run(folder: Path, report: str, *arguments: str) -> tuple[str, list[FailureGroup]]:
    """The terminal's text and the blocks of one run."""
    command = [sys.executable, "-m", "moe_conformance", *arguments, "--report", report]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    text = (folder / report / "report.json").read_text(encoding="utf-8")
    return done.stdout, group_failures(Report.model_validate_json(text).cases)


def test_reproduce_line_gives_its_block_again(tmp_path: Path) -> None:
    """Of wrong results and of a crash: the same verdict, blame and backends, with the case that was shown."""
    write_wrong_plugins(tmp_path)
    named = [part for name in WRONG for part in ("--consumer", f"wrong:{name}")]
    clauses = [part for clause in ("MAP-4", "NORM-1", "NUM-1", "CAP-1") for part in ("--clause", clause)]
    options = ["--profile", "smoke", "--tp", "1", "--device", "cpu", "--seed", "3", "--timeout", "90"]
    text, groups = run(tmp_path, "all", "run", *named, *clauses, *options)
    found = [match for match in map(COMMAND.match, text.splitlines()) if match]
    assert len(found) == len(groups) >= len(WRONG)
    assert any(match["clause"] for match in found), "no block whose test is another clause's"
    for number, (group, match) in enumerate(zip(groups, found, strict=True)):
        assert match["clause"] in (None, group.shown.clause)
        assert (match["clause"] is None) == (group.clause in ("", group.shown.clause))
        program, *arguments = shlex.split(match["command"])
        assert program == "moe-conformance"
        _, again = run(tmp_path, f"again{number}", *arguments)
        same = [other for other in again if other.subject == group.subject and other.clause == group.clause]
        assert group.shown.id in {case.id for other in same for case in other.cases}
        assert {other.verdict for other in same} == {group.verdict}
