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

class Needs:
    def __init__(self, size): ...

class Described:
    declaration = {"name": "x"}
    def open(self, group, capacity): ...

class Mixed:
    declaration = finish.declaration
    def load(self, layer, config): ...

class Halved:
    declaration = make.declaration

halves = Backend(consumer=Halved())

both = Backend(make, finish)
number = 3
unready = object()
"""

DECLARED = """
from moe_contract import consumer

@consumer(name="tail", profile="Z")
def tail(group, output, residual, norm_weight, *, eps, weight_bias): ...
"""
TAKING = """
from moe_contract import consumer

@consumer(name="tail")
def tail(output, residual): ...
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a plug-in module that lies in the current folder."""
    (tmp_path / "toy_plugin.py").write_text(PLUGIN)
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no driver')")
    (tmp_path / "needy_plugin.py").write_text("x = 1\nimport absent_library\n")
    (tmp_path / "mistyped_plugin.py").write_text("def it(:\n")
    (tmp_path / "ending_plugin.py").write_text("import sys\nsys.exit(3)\n")
    (tmp_path / "declared_plugin.py").write_text(DECLARED)
    (tmp_path / "taking_plugin.py").write_text(TAKING)
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
        ("no-gpu", r"backend 'no-gpu' could not be imported: broken_plugin\.py:1: RuntimeError: no driver"),
        ("no_such_module:x", "could not be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("no_such_module:x", r"\(looked in the current folder and among the installed packages\)"),
        ("needy_plugin:x", r"needy_plugin\.py:2: ModuleNotFoundError: No module named 'absent_library'$"),
        ("mistyped_plugin:x", r"mistyped_plugin\.py:1: SyntaxError: invalid syntax"),
        ("ending_plugin:x", r"ending_plugin\.py:2: it ended the program \(3\)"),
        (
            "declared_plugin:tail",
            r"imported: declared_plugin\.py:4: ConsumerDeclaration of 'tail': profile: got 'Z', exp",
        ),
        ("taking_plugin:tail", r"imported: taking_plugin\.py:4: tail is called with \(group, output, residual, "),
        (
            "toy_plugin:mkae",
            r"toy_plugin has no 'mkae'; did you mean 'toy_plugin:make'\? \(its backends: .*finish, .*make",
        ),
        ("toy_plugin:Space.iner", r"toy_plugin:Space has no 'iner'; did you mean 'toy_plugin:Space.inner'\?"),
        ("pathlib:Paht", r"pathlib has no 'Paht' \(it holds no backend, see moe_contract\.consumer\)"),
        ("toy_plugin.py:make", "expected the name of a module, got that of a file; write toy_plugin:make$"),
        ("./sub/toy_plugin.py:make", r"write toy_plugin:make, run in the folder \./sub"),
        ("toy_plugin.py", "toy_plugin.py is a file here: name its object, as toy_plugin:object"),
        ("toy_plugin", "toy_plugin.py is a file here: name its object, as toy_plugin:object"),
        ("toy_plugin:", "expected module:object, such as mine:tail"),
        (":make", "expected module:object, such as mine:tail"),
        ("toy_plugin:Needs", r"toy_plugin\.py:\d+: Needs is called with \(\), but takes \(size\): missing"),
        (
            "toy_plugin:Described",
            "its Described has open.. and a declaration that is a dict; expected a moe_contract.Con",
        ),
        (
            "toy_plugin:Mixed",
            "its Mixed has load.. and a declaration that is a ConsumerDeclaration; expected a moe_con",
        ),
        ("toy_plugin:Halved", "is a Halved; expected an object with 'declaration' and 'load'"),
        ("toy_plugin:halves", r"its Halved has no method open\(\)"),
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
