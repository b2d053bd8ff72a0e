"""Rows and results of the bench for the tests of its views."""

from __future__ import annotations

from typing import Any

from moe_conformance.bench.model import BenchResult, BenchRow, with_ratios
from moe_conformance.report.environment import environment


def bench_row(consumer: str, median: float | None, tokens: int = 1, **fields: Any) -> BenchRow:
    """One row; a median of None is a wrong result, which has no times."""
    times = {"median_us": median, "p10_us": median, "p90_us": median, "effective_tbps": 1.0, "share_of_copy": 0.25}
    given: dict[str, Any] = {
        "consumer": consumer, "mode": "solo", "cache": "cold", "tokens": tokens, "hidden_size": 7168, "top_k": 8,
        "ranks": 2, "dtype": "bfloat16", "correct": median is not None,
    }  # fmt: skip
    return BenchRow(**given | (times if median is not None else {}) | fields)


def bench_result(*rows: BenchRow, **fields: Any) -> BenchResult:
    """A whole run with these rows."""
    given: dict[str, Any] = {
        "complete": True, "started": "2026-01-01T00:00:00+00:00", "command": "moe-conformance bench",
        "environment": environment("cpu"), "driver": "1", "copy_tbps": 4.0, "empty_node_us": 0.5,
        "host_call_us": {}, "rows": with_ratios(list(rows)),
    }  # fmt: skip
    return BenchResult(**given | fields)
