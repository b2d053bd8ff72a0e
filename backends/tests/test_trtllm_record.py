"""The table of FlashInfer's versions in docs is what the recorded signatures give."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from moe_backends.trtllm.signature_record import differences, record, table
from moe_backends.trtllm.signatures import FILE, recorded

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_table_is_that_of_the_record() -> None:
    """Otherwise run nox -s abi -- --write."""
    assert (DOCS / "flashinfer-abi.md").read_text(encoding="utf-8") == table(recorded())


def test_record_is_as_it_is_written() -> None:
    """Reading the record and writing it again gives the same file."""
    assert files("moe_backends.trtllm").joinpath(FILE).read_text(encoding="utf-8") == record(recorded())


def test_a_wheel_that_differs_is_named() -> None:
    """A changed default shows as one line with both forms."""
    version, known = next(iter(recorded().items()))
    name, parameters = next(iter(known.items()))
    (found,) = differences(version, {**known, name: [*parameters, ["extra", "None"]]})
    assert found.startswith(f"{version} {name}: recorded (") and found.endswith(", extra=None)")
