"""Tests of the suite that no fault of this machine can make fail, each with the reason why it stays."""

from __future__ import annotations

from collections.abc import Mapping

JUSTIFIED: Mapping[str, str] = {
    "test_graph.py::test_graph_replay_equals_eager": "runs on a CUDA device; its two faults do too",
}
"""Test: why no fault of a CPU run makes it fail. What is not here and kills nothing has to go."""
