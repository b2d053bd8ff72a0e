"""SPEC.md says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

import moe_contract
from moe_contract import outputs, spec
from moe_contract.clauses import registry


def test_spec_file_equals_its_generator() -> None:
    """The committed file is what the generator writes today."""
    assert spec.SPEC_PATH.read_text(encoding="utf-8") == spec.generate(), "run python -m moe_contract.spec"


def test_check_notices_an_outdated_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """--check writes nothing, fails on a missing or changed file and says what to do; without it the file is made."""
    target = tmp_path / "SPEC.md"
    monkeypatch.setattr(spec, "SPEC_PATH", target)
    assert spec.main(["--check"]) == 1 and not target.exists()
    assert "python -m moe_contract.spec" in capsys.readouterr().err
    assert spec.main([]) == 0 and spec.main(["--check"]) == 0
    target.write_text(target.read_text().replace("MAP-4", "MAP-5"))
    assert spec.main(["--check"]) == 1


def test_spec_holds_every_clause_and_field() -> None:
    """Each id, each field of the objects and each routing of a rounding profile is in the text."""
    text = spec.generate()
    assert all(f"`{clause}` |" in text for clause in registry())
    for field in ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx", "route_major", "shared_output"):
        assert f"`{field}`" in text
    assert "`routed_scaling_factor` | `float` | `1.0`" in text
    assert moe_contract.CONTRACT_VERSION in text.splitlines()[0]


def test_attribute_docs_reads_the_string_below_a_constant() -> None:
    """The generator takes recipes from the code's own docstrings, on one line."""
    docs = spec.attribute_docs(moe_contract.quant)
    assert docs["FP8_MAX"].startswith("Largest finite value")
    assert "\n" not in docs["QuantFormat.NVFP4"] and "low nibble" in docs["QuantFormat.NVFP4"]
    assert "gemm2_permuted" not in spec.attribute_docs(outputs)
