"""The tutorial's plug-ins are what they claim: complete, short and right."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from moe_conformance.direct import run_direct
from moe_conformance.plan import PlanRequest
from moe_conformance.verdicts import Verdict

DOCS = Path(__file__).parents[2] / "docs"
MOST_LINES = 30
PLUG_INS = {"consumer": "acme_tail", "producer": "acme_moe"}


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", PLUG_INS.values())
def test_tutorial_backend_is_at_most_30_lines(name: str) -> None:
    """A complete third-party backend fits in 30 lines."""
    assert len((DOCS / f"{name}.py").read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("side", PLUG_INS)
def test_tutorial_backend_keeps_every_clause(side: str) -> None:
    """Each of the tutorial's backends passes the smoke profile. Most of a tail's cases run, and a third of those of
    a producer that declares one routing method."""
    name = PLUG_INS[side]
    backend = getattr(_module(name), name)
    _require_all_kept(side, backend, one_in=2 if side == "consumer" else 3)


def test_stateful_example_keeps_every_clause() -> None:
    """A class that does by itself what the decorator does for a function."""
    _require_all_kept("consumer", _module("acme_stateful").backend, one_in=2)


def _require_all_kept(side: str, backend: Any, *, one_in: int) -> None:
    """No case of the smoke profile fails, and more than one in so many passes."""
    request = PlanRequest(**{f"{side}s": (backend.declaration.name,)}, profile="smoke")
    results = list(run_direct(request, **{side: backend}))
    wrong = [f"{r.id}: {r.reason}" for r in results if r.verdict not in (Verdict.PASS, Verdict.UNSUPPORTED)]
    assert not wrong, wrong
    assert sum(r.verdict is Verdict.PASS for r in results) > len(results) / one_in
