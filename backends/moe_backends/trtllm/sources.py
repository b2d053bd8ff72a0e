"""Reads the entry points' signatures from FlashInfer's sources, in a wheel or installed, without importing them."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from .returns import Entry
from .signatures import Recorded
from .versions import Version

PREPARATION = (
    "_maybe_get_cached_w3_w1_permute_indices",
    "get_w2_permute_indices_with_cache",
    "reorder_rows_for_gated_act_gemm",
    "convert_to_block_layout",
    "shuffle_matrix_a",
    "shuffle_matrix_sf_a",
    "block_scale_interleave",
    "fp4_quantize",
)
"""What the adapters' own preparation is compared with, and the quantiser that they call."""
FUNCTIONS = (*(entry.value for entry in Entry), *PREPARATION)
SOURCES = re.compile(r"flashinfer/(fused_moe/core|fp4_quantization|quantization/fp4_quantization|utils)\.py")


class WheelError(ValueError):
    """Not a FlashInfer wheel, or one without the functions."""


def read_wheel(path: Path) -> tuple[Version, Recorded]:
    """The version of a wheel and the signatures of FUNCTIONS in it; WheelError where one is missing."""
    with zipfile.ZipFile(path) as archive:
        found = _signatures(archive.read(name) for name in archive.namelist() if SOURCES.fullmatch(name))
    if missing := [name for name in FUNCTIONS if name not in found]:
        raise WheelError(f"{path.name}: no {', '.join(missing)} in its sources")
    return _version(path), {name: found[name] for name in FUNCTIONS}


def read_installed(package: Path) -> Recorded:
    """The signatures of those FUNCTIONS that the sources of an installed ``flashinfer`` folder have."""
    files = (file for file in package.rglob("*.py") if SOURCES.fullmatch(file.relative_to(package.parent).as_posix()))
    return _signatures(file.read_bytes() for file in files)


def _version(path: Path) -> Version:
    found = re.match(r"flashinfer_python-([^-]+)-.*\.whl$", path.name)
    if found is None:
        raise WheelError(f"{path.name}: expected a wheel of flashinfer-python")
    return Version.parse(found.group(1))


def _signatures(sources: Iterable[bytes]) -> Recorded:
    found: Recorded = {}
    for source in sources:
        for function in _functions(ast.parse(source)):
            found.setdefault(function.name, _parameters(function))
    return found


def _functions(module: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in FUNCTIONS)


def _parameters(function: ast.FunctionDef) -> list[list[str]]:
    spec = function.args
    plain = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(plain) - len(spec.defaults)) + [ast.unparse(default) for default in spec.defaults]
    found = [
        [each.arg] if default is None else [each.arg, default] for each, default in zip(plain, defaults, strict=True)
    ]
    for each, node in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        found.append([each.arg, "" if node is None else ast.unparse(node), "keyword"])
    return found
