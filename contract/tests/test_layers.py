"""Dependencies point one way: conformance -> backends -> contract; conformance finds backends by discovery alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "moe_contract": ROOT / "contract" / "moe_contract",
    "moe_backends": ROOT / "backends" / "moe_backends",
    "moe_conformance": ROOT / "conformance" / "moe_conformance",
}
ALLOWED = {
    "moe_contract": {"torch", "pydantic", "moe_contract"},
    "moe_backends": {"torch", "pydantic", "moe_contract", "moe_backends"},
}
"""What may be imported besides the standard library: by the contract anywhere, by the backends when imported."""
FORBIDDEN = {"moe_contract": {"moe_backends", "moe_conformance"}, "moe_backends": {"moe_conformance"}}
FORBIDDEN["moe_conformance"] = {"moe_backends"}
SHARED = {"common", "jit", "__pycache__"}
"""Folders of moe_backends that are not backends."""
DISCOVERED_AT_IMPORT = {"moe_conformance": {"moe_backends"}}
"""What a module finds by entry point when it is imported: planted faults are made of the reference backends."""
GPU_ONLY = ("flashinfer", "vllm", "tvm_ffi", "triton", "cuda")
"""Packages that are absent or slow to import without a GPU."""


DEVICE_CODE = {"kernels.py": {"triton"}}
"""Files of Triton kernels, which cannot be written without it; whoever uses them imports them inside a function."""


def imported_names(node: ast.AST) -> Iterator[str]:
    """Top-level names that this one node imports: statements, and calls of import_module with a literal name."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield node.module.partition(".")[0]
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
            yield node.args[0].value.partition(".")[0]


def all_imports(tree: ast.AST) -> set[str]:
    """Everything that a module imports, inside functions too."""
    return {name for node in ast.walk(tree) for name in imported_names(node)}


def imports_at_import(tree: ast.AST) -> set[str]:
    """What importing the module imports: not what a function or a TYPE_CHECKING block does."""
    names: set[str] = set()
    pending = list(ast.iter_child_nodes(tree))
    while pending:
        node = pending.pop()
        names.update(imported_names(node))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)
    return names


def modules(package: str) -> list[tuple[Path, ast.Module]]:
    """The parsed files of a package; at least its __init__, so that no rule below holds for want of files."""
    files = sorted(PACKAGES[package].rglob("*.py"))
    assert files, f"no source files of {package} in {PACKAGES[package]}"
    return [(file, ast.parse(file.read_text(encoding="utf-8"), str(file))) for file in files]


def offences(found: list[tuple[Path, set[str]]]) -> list[str]:
    """One line for each file that imports what it must not."""
    return [f"{file.relative_to(ROOT)} imports {', '.join(sorted(names))}" for file, names in found if names]


def test_contract_imports_only_torch_and_pydantic() -> None:
    """The contract needs torch and pydantic alone, even inside functions: no numpy, flashinfer or vLLM."""
    allowed = ALLOWED["moe_contract"] | sys.stdlib_module_names
    assert not offences([(file, all_imports(tree) - allowed) for file, tree in modules("moe_contract")])


def test_backends_import_optional_packages_only_when_used() -> None:
    """Importing any backend needs torch alone; what needs a GPU or an extra is imported inside a function."""
    allowed = ALLOWED["moe_backends"] | sys.stdlib_module_names
    found = [
        (file, imports_at_import(tree) - allowed - DEVICE_CODE.get(file.name, set()))
        for file, tree in modules("moe_backends")
    ]
    assert not offences(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_towards_the_contract(package: str) -> None:
    """No package imports one above it, and the suite imports no backend: it finds them by entry point."""
    found = [(file, all_imports(tree) & FORBIDDEN[package]) for file, tree in modules(package)]
    assert not offences(found)


def test_no_backend_is_made_of_another() -> None:
    """What two backends share lies beside them, in ``common``, ``jit`` or a module of moe_backends itself."""
    folder = PACKAGES["moe_backends"]
    backends = {path.name for path in folder.iterdir() if path.is_dir()} - SHARED
    assert backends
    found = []
    for file, tree in modules("moe_backends"):
        parts = [node.module.split(".") for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        siblings = {each[1] for each in parts if each[0] == "moe_backends" and len(each) > 1} & backends
        found.append((file, siblings - {file.relative_to(folder).parts[0]}))
    assert not offences(found)


@pytest.mark.parametrize("package", PACKAGES)
def test_import_loads_nothing_that_needs_a_gpu(package: str) -> None:
    """A fresh interpreter imports every module without a GPU library or a package above it; CUDA stays untouched."""
    files = [file.relative_to(PACKAGES[package].parent) for file, _ in modules(package) if file.name not in DEVICE_CODE]
    names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files]
    assert package in names and len(names) > 1
    unwanted = sorted({*GPU_ONLY, *FORBIDDEN[package]} - DISCOVERED_AT_IMPORT.get(package, set()))
    code = (
        f"import sys, torch; from importlib import import_module; before = set(sys.modules); "
        f"[import_module(name) for name in {names!r}]; "
        f"new = {{name.partition('.')[0] for name in set(sys.modules) - before}}; "
        f"print(sorted(new & set({unwanted!r})), torch.cuda.is_initialized())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[] False", result.stdout + result.stderr


@pytest.mark.parametrize(
    ("source", "anywhere", "at_import"),
    [
        ("import numpy.linalg as la", {"numpy"}, {"numpy"}),
        ("from moe_backends.reference import backend", {"moe_backends"}, {"moe_backends"}),
        ("from . import layer\nfrom .layer import MoELayer", set(), set()),
        ("def f():\n    import flashinfer.comm", {"flashinfer"}, set()),
        ("class C:\n    import flashinfer", {"flashinfer"}, {"flashinfer"}),
        ("try:\n    import vllm\nexcept ImportError:\n    vllm = None", {"vllm"}, {"vllm"}),
        ("if TYPE_CHECKING:\n    import vllm\nelse:\n    import numpy", {"vllm", "numpy"}, {"numpy"}),
        ("import importlib\nx = importlib.import_module('moe_backends.cuda')", {"importlib", "moe_backends"}, None),
        ("from importlib import import_module as m\nimport_module('vllm')", {"importlib", "vllm"}, None),
    ],
)
def test_import_in_any_form_is_seen(source: str, anywhere: set[str], at_import: set[str] | None) -> None:
    """The rules above see plain, nested, guarded and dynamic imports; ``at_import`` None: the same as anywhere."""
    tree = ast.parse(source)
    assert all_imports(tree) == anywhere
    assert imports_at_import(tree) == (anywhere if at_import is None else at_import)
