"""The table of real models in docs is what the measured results give, and says what the declarations say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from moe_conformance.cases.models import models

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """benchmarks/trtllm_models.py."""
    spec = importlib.util.spec_from_file_location("trtllm_models", ROOT / "benchmarks" / "trtllm_models.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_table_is_that_of_the_results(script: ModuleType) -> None:
    """Otherwise run python benchmarks/trtllm_models.py --table."""
    text = script.DOCS.read_text(encoding="utf-8")
    assert text == script.documented(text, script.table(json.loads(script.RESULTS.read_text(encoding="utf-8"))))


def test_every_profile_that_ran_held(script: ModuleType) -> None:
    """Nothing but passes and declared absences, and some passes of every layer."""
    for name, found in json.loads(script.RESULTS.read_text(encoding="utf-8")).items():
        assert name.split()[0] in models(), name
        assert set(found["verdicts"]) <= {"pass", "unsupported"} and found["exit_status"] == 0, name


def test_llama4_and_padded_widths_do_not_defer(script: ModuleType) -> None:
    """In the table as in the declarations."""
    every = {
        f"{name} {producer}": {"verdicts": {}, "intermediate_size": 16, "cpu_seconds": 0.0, "gigabytes": 0.0}
        for name in models()
        for producer in script.PRODUCERS
    }
    cells = [row.split(" | ") for row in script.table(every).splitlines()[2:]]
    rows = {(row[0], row[5]): row[6] for row in cells}
    assert rows["| llama4-scout", "trtllm-bf16"] == rows["| llama4-maverick", "trtllm-bf16"] == "no"
    assert rows["| nemotron-3-nano", "trtllm-nvfp4"] == "no"
    assert rows["| nemotron-3-nano", "trtllm-bf16"] == rows["| deepseek-v3", "trtllm-nvfp4"] == "yes"
    assert rows["| gpt-oss-120b", "trtllm-bf16"] == "-"
