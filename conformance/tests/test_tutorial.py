"""The tutorial's plug-in is what it claims: complete, short and right."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from moe_conformance.direct import run_direct
from moe_conformance.plan import PlanRequest
from moe_conformance.verdicts import Verdict

TUTORIAL = Path(__file__).parents[2] / "docs" / "acme_tail.py"
MOST_LINES = 30


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("acme_tail", TUTORIAL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tutorial_consumer_is_at_most_30_lines() -> None:
    """A complete third-party consumer fits in 30 lines."""
    assert len(TUTORIAL.read_text().splitlines()) <= MOST_LINES


def test_tutorial_consumer_keeps_every_clause() -> None:
    """The tutorial's consumer passes the smoke profile."""
    request = PlanRequest(consumers=("acme-tail",), profile="smoke")
    results = list(run_direct(request, consumer=_module().acme_tail))
    wrong = [f"{r.id}: {r.reason}" for r in results if r.verdict not in (Verdict.PASS, Verdict.UNSUPPORTED)]
    assert not wrong, wrong
    assert sum(r.verdict is Verdict.PASS for r in results) > len(results) / 2
