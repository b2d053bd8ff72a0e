"""The files that programs read: their schemas in the documents are current, and other versions are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from moe_conformance.schemas import FILES, main, read_file, schema_text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200"
WRITTEN = {"bench.schema.json": RESULTS / "bench.json", "report.schema.json": RESULTS / "cuda-core.report.json"}


@pytest.mark.parametrize("name", FILES)
def test_documented_schema_is_that_of_the_model(name: str, tmp_path: Path) -> None:
    """``python -m moe_conformance.schemas docs/schemas`` would change nothing."""
    assert main([str(tmp_path)]) == 0
    written = (tmp_path / name).read_text(encoding="utf-8")
    assert written == schema_text(FILES[name]) == (ROOT / "docs" / "schemas" / name).read_text(encoding="utf-8")


@pytest.mark.skipif(not RESULTS.is_dir(), reason="the results are in the checkout alone")
@pytest.mark.parametrize("name", FILES)
def test_measured_files_are_read_and_other_versions_are_refused(name: str, tmp_path: Path) -> None:
    """One line that names the file, the version that it has, and the one that is known."""
    model: type[BaseModel] = FILES[name]
    given = json.loads(WRITTEN[name].read_text(encoding="utf-8"))
    known = read_file(model, WRITTEN[name], "a test")
    assert model.model_validate_json(known.model_dump_json()) == known
    other = tmp_path / "other.json"
    other.write_text(json.dumps(given | {"schema_version": 99, "from_the_future": 1}))
    with pytest.raises(ValueError, match=r"other.json has schema_version 99, .* reads 1; expected .* a test wrote$"):
        read_file(model, other, "a test")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 1}', "no JSON"])
def test_what_is_no_such_file_is_refused_in_one_line(name: str, text: str, tmp_path: Path) -> None:
    """Whatever it holds."""
    file = tmp_path / "file.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is not of the known form") as caught:
        read_file(FILES[name], file, "a test")
    assert "\n" not in str(caught.value)


def test_without_a_folder_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2 and one line."""
    assert main(["/no/such/folder"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
