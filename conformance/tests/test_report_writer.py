"""The files of a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_conformance.report.model import Report
from moe_conformance.report.writer import ReportFolderError, prepare_folder, write_report

from .report_factory import failure, report_of, result


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
