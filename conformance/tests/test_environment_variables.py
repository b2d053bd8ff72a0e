"""Every environment variable that the project reads or sets is in docs/environment.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("contract/moe_contract", "backends/moe_backends", "conformance/moe_conformance")
DOCUMENTED = set(re.findall(r"`([A-Z][A-Z0-9_]+)[`=]", (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")))


def is_environment(node: ast.expr) -> bool:
    """Whether the expression is ``os.environ``."""
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def names_read(source: str) -> Iterator[str]:
    """The names that ``os.environ`` and ``os.getenv`` are asked for: literals, and constants of the same file."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and is_environment(node.value):
            key = node.slice
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and (is_environment(node.func.value) or node.func.attr == "getenv")
            and node.args
        ):
            key = node.args[0]
        value = key.value if isinstance(key, ast.Constant) else constants.get(getattr(key, "id", ""))
        if isinstance(value, str):
            yield value


@pytest.mark.parametrize(
    "source",
    ["os.environ['X_Y']", "os.environ.get('X_Y', '')", "os.getenv('X_Y')", "NAME = 'X_Y'\nos.environ.get(NAME)"],
)
def test_names_are_found_however_they_are_read(source: str) -> None:
    """A literal or a constant, by index or by call."""
    assert list(names_read(source)) == ["X_Y"]


@pytest.mark.parametrize("folder", [*PACKAGES, "contract/tests", "backends/tests", "conformance/tests", "noxfile.py"])
def test_variables_are_documented(folder: str) -> None:
    """The packages' variables of whatever name, and the project's own in tests and sessions."""
    path = ROOT / folder
    found: dict[str, str] = {}
    for file in path.rglob("*.py") if path.is_dir() else [path]:
        text = file.read_text(encoding="utf-8")
        names = set(re.findall(r"\bMOE_(?:CONFORMANCE|FLASHINFER)_[A-Z_]+\b", text))
        if folder in PACKAGES:
            names.update(names_read(text))
        found.update(dict.fromkeys(names - DOCUMENTED, file.name))
    assert not found, f"not in docs/environment.md: {found}"


def test_documented_variables_exist() -> None:
    """A name of the project's own that nothing reads is not left in the page."""
    files = [file for folder in ("contract", "backends", "conformance") for file in (ROOT / folder).rglob("*.py")]
    text = "".join(file.read_text(encoding="utf-8") for file in [*files, ROOT / "noxfile.py"])
    assert not {name for name in DOCUMENTED if name.startswith("MOE_") and f'"{name}"' not in text}
