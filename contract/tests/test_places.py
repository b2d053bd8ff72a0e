"""Messages name the line that the plug-in's author has to look at, not one of ours."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path

import pytest
import torch

from moe_contract.places import place_of_callable, place_of_caller, place_of_error

OUTER = """
import torch

import places_inner

def call_torch():
    torch.zeros(-1)

def call_beside():
    places_inner.fail()
"""
INNER = """
def fail():
    raise KeyError("no such buffer")
"""


@pytest.fixture
def outer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """A plug-in of two modules that lie beside one another."""
    (tmp_path / "places_outer.py").write_text(OUTER, encoding="utf-8")
    (tmp_path / "places_inner.py").write_text(INNER, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module("places_outer")


@pytest.mark.parametrize(
    ("function", "place"), [("call_torch", "places_outer.py:7"), ("call_beside", "places_inner.py:3")]
)
def test_error_is_placed_in_the_plug_in(outer: object, function: str, place: str) -> None:
    """Not inside torch, but in the module beside it where that one raised."""
    with pytest.raises((KeyError, RuntimeError)) as caught:
        getattr(outer, function)()
    trace = caught.value.__traceback__
    assert trace is not None
    assert place_of_error(caught.value.with_traceback(trace.tb_next)) == place  # without this test's own frame


def test_error_that_came_through_no_plug_in_has_no_place() -> None:
    """One that only our own code raised."""
    assert place_of_error(KeyError("never raised")) == ""


def test_callable_is_placed_where_it_is_defined() -> None:
    """Functions, partials, methods and objects that are called; compiled code has no place."""
    line = _function.__code__.co_firstlineno
    for function in (_function, functools.partial(_function, 1), functools.partial(functools.partial(_function), 1)):
        assert place_of_callable(function) == f"test_places.py:{line}"
    for other in (_Called(), _Called().method, _Called):
        assert place_of_callable(other).startswith("test_places.py:")
    for compiled in (max, torch.add, functools.partial(max, 1)):
        assert place_of_callable(compiled) == ""


def test_caller_is_the_nearest_code_that_is_not_ours() -> None:
    """Here this test."""
    assert place_of_caller().startswith("test_places.py:")


def _function(a: int) -> int:
    return a


class _Called:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1

    def method(self) -> None:
        self.calls += 1
