"""Reads the entry points' signatures from a wheel's sources, without importing it; writes and compares the record.

``python -m moe_backends.trtllm.abi WHEEL...`` checks wheels against the record and every call against the wheels;
``--write`` records them anew, ``--table FILE`` writes the table of docs.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .bindings import problems
from .returns import Entry
from .signatures import FILE, Recorded, recorded
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
ENUMS = re.compile(r"flashinfer/(fused_moe/core|tllm_enums)\.py")


class WheelError(ValueError):
    """Not a FlashInfer wheel, or one without the functions."""


def read_wheel(path: Path) -> tuple[Version, Recorded]:
    """The version of a wheel and the signatures of FUNCTIONS in it; WheelError where one is missing."""
    version = _version(path)
    found: Recorded = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if SOURCES.fullmatch(name):
                for function in _functions(ast.parse(archive.read(name))):
                    found.setdefault(function.name, _parameters(function))
    if missing := [name for name in FUNCTIONS if name not in found]:
        raise WheelError(f"{path.name}: no {', '.join(missing)} in its sources")
    return version, {name: found[name] for name in FUNCTIONS}


def routing_numbers(path: Path) -> dict[str, int]:
    """``RoutingMethodType`` of a wheel: name to number."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if ENUMS.fullmatch(name):
                for node in ast.walk(ast.parse(archive.read(name))):
                    if isinstance(node, ast.ClassDef) and node.name == "RoutingMethodType":
                        return _members(node)
    raise WheelError(f"{path.name}: no RoutingMethodType in its sources")


def differences(version: Version, found: Recorded) -> list[str]:
    """One line for each function whose signature is not the recorded one."""
    known = recorded().get(version)
    if known is None:
        return [f"{version}: not recorded; run with --write"]
    return [
        f"{version} {name}: recorded ({_shown(known[name])}), the wheel has ({_shown(found[name])})"
        for name in FUNCTIONS
        if known.get(name) != found[name]
    ]


def record(wheels: dict[Version, Recorded]) -> str:
    """The record as JSON: per version the functions that differ from the version before."""
    lines, current = {}, Recorded()
    for version in sorted(wheels):
        changes = {name: value for name, value in wheels[version].items() if current.get(name) != value}
        lines[str(version)] = changes
        current |= changes
    body = ",\n".join(f" {json.dumps(version)}: {_function_lines(changes)}" for version, changes in lines.items())
    return "{\n" + body + "\n}\n"


def table(wheels: dict[Version, Recorded]) -> str:
    """The table of docs: what each version adds to or takes from each function, and whether every call binds."""
    lines = [
        "# FlashInfer's entry points by version",
        "",
        "Written by `nox -s abi -- --write` from the sources of each wheel; nothing is imported. A call *binds* when",
        "every keyword that the adapters pass exists and every required parameter is passed.",
        "",
        "| version | calls | what changed since the version above |",
        "|---|---|---|",
    ]
    before = Recorded()
    for version in sorted(wheels):
        wrong = problems(version, wheels[version])
        changes = (
            [_changed(name, before[name], wheels[version][name]) for name in FUNCTIONS if before] if before else []
        )
        text = "; ".join(filter(None, changes)) or ("first that is checked" if not before else "nothing")
        lines.append(f"| {version} | {'; '.join(wrong) or 'all bind'} | {text} |")
        before = wheels[version]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 where a wheel differs from the record or a call does not bind."""
    parser = argparse.ArgumentParser(prog="python -m moe_backends.trtllm.abi", description=__doc__.splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="record what the wheels have")
    parser.add_argument("--table", type=Path, help="write the table of docs there")
    options = parser.parse_args(arguments)
    wheels = dict(read_wheel(path) for path in options.wheels)
    if options.write:
        Path(__file__).with_name(FILE).write_text(record(wheels), encoding="utf-8")
    if options.table is not None:
        options.table.write_text(table(wheels), encoding="utf-8")
    wrong = [line for version, found in sorted(wheels.items()) for line in _checked(version, found, options.write)]
    print("\n".join(wrong) or f"{len(wheels)} wheels as recorded, every call binds")
    return bool(wrong)


def _checked(version: Version, found: Recorded, written: bool) -> Iterator[str]:
    if not written:
        yield from differences(version, found)
    yield from (f"{version}: {problem}" for problem in problems(version, found))


def _version(path: Path) -> Version:
    found = re.match(r"flashinfer_python-([^-]+)-.*\.whl$", path.name)
    if found is None:
        raise WheelError(f"{path.name}: expected a wheel of flashinfer-python")
    return Version.parse(found.group(1))


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


def _members(node: ast.ClassDef) -> dict[str, int]:
    members = {}
    for line in node.body:
        if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
            value = ast.literal_eval(line.value)
            members[line.targets[0].id] = value[0] if isinstance(value, tuple) else value
    return members


def _shown(parameters: list[list[str]]) -> str:
    return ", ".join("=".join(filter(None, parameter[:2])) for parameter in parameters)


def _changed(name: str, old: list[list[str]], new: list[list[str]]) -> str:
    before, after = {each[0]: each[1:] for each in old}, {each[0]: each[1:] for each in new}
    parts = [f"+{each} at {list(after).index(each)}" for each in after if each not in before]
    parts += [f"-{each}" for each in before if each not in after]
    parts += [f"{each} default {after[each][0]}" for each in after if each in before and after[each] != before[each]]
    return f"`{name}` {', '.join(parts)}" if parts else ""


def _function_lines(changes: Recorded) -> str:
    lines = [f"  {json.dumps(name)}: {json.dumps(parameters)}" for name, parameters in changes.items()]
    return "{\n" + ",\n".join(lines) + "\n }" if lines else "{}"


if __name__ == "__main__":
    sys.exit(main())
