"""Compares wheels with the recorded signatures, and every call of the adapters with the wheels; writes the record.

``python -m moe_backends.trtllm.signature_record WHEEL...`` checks wheels against the record and every call against the
wheels; ``--write`` records them anew, ``--table FILE`` writes the table of docs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .bindings import problems
from .signatures import FILE, Recorded, recorded
from .sources import FUNCTIONS, read_wheel
from .versions import Version


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
    parser = argparse.ArgumentParser(
        prog="python -m moe_backends.trtllm.signature_record", description=__doc__.splitlines()[0]
    )
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
