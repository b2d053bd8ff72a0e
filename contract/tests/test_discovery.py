"""Backends are found by name or by module:object; every failure is one line for the user."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from moe_contract import Backend, discovery
from moe_contract.discovery import BackendNotFoundError, load_backend, load_consumer, load_producer

PLUGIN = """
from moe_contract import Backend, consumer, producer

@producer(name="toy-producer")
def make(layer, config, hidden_states, router_logits):
    return hidden_states

@consumer(name="toy-tail")
def finish(group, output, residual, norm_weight, *, eps, weight_bias):
    return residual, residual

class Lazy:
    declaration = make.declaration
    def load(self, layer, config):
        return make.load(layer, config)

class Space:
    inner = make

both = Backend(make, finish)
number = 3
unready = object()
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a plug-in module that lies in the current folder."""
    (tmp_path / "toy_plugin.py").write_text(PLUGIN)
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "toy_plugin"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two entry points, one of which cannot be imported."""
    points = {
        name: EntryPoint(name=name, value=value, group=discovery.ENTRY_POINT_GROUP)
        for name, value in {"toy": "toy_plugin:both", "no-gpu": "broken_plugin:both"}.items()
    }
    monkeypatch.setattr(discovery, "installed_backends", lambda: points)


def test_object_is_found_by_module_and_name(plugin: str) -> None:
    """Functions, classes, dotted names and whole backends."""
    assert load_producer(f"{plugin}:make").declaration.name == "toy-producer"
    assert load_consumer(f"{plugin}:finish").declaration.name == "toy-tail"
    assert load_producer(f"{plugin}:Lazy").declaration.name == "toy-producer"
    assert load_producer(f"{plugin}:Space.inner").declaration.name == "toy-producer"
    both = load_backend(f"{plugin}:both")
    assert isinstance(both, Backend) and both.producer is not None and both.consumer is not None


@pytest.mark.usefixtures("installed")
def test_installed_name_is_found(plugin: str) -> None:
    """An entry point's object, under its name."""
    assert load_consumer("toy").declaration.name == "toy-tail"


@pytest.mark.usefixtures("installed", "plugin")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tyo", r"unknown backend 'tyo'; did you mean 'toy'\? \(installed: no-gpu, toy; or give module:object\)"),
        ("zzzzzz", r"unknown backend 'zzzzzz' \(installed: no-gpu, toy; or give module:object\)"),
        ("no-gpu", "backend 'no-gpu' could not be imported: RuntimeError: no driver"),
        ("no_such_module:x", "could not be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("toy_plugin:absent", "could not be imported: AttributeError: .*'absent'"),
        ("toy_plugin:number", "is a int; expected an object with 'declaration' and 'load'"),
        ("toy_plugin:unready", "is a object; expected an object with 'declaration'"),
    ],
)
def test_backend_that_cannot_be_found_says_why(name: str, message: str) -> None:
    """One line with the name, the cause and what to do."""
    with pytest.raises(BackendNotFoundError, match=message) as caught:
        load_backend(name)
    assert "\n" not in str(caught.value)


def test_missing_side_is_named(plugin: str) -> None:
    """A producer is not taken for a consumer, nor the reverse."""
    with pytest.raises(BackendNotFoundError, match="has no consumer, only a producer"):
        load_consumer(f"{plugin}:make")
    with pytest.raises(BackendNotFoundError, match="has no producer, only a consumer"):
        load_producer(f"{plugin}:finish")
