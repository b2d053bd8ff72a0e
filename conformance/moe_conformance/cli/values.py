"""Values of options that several commands take; each raises CommandError in one line."""

from __future__ import annotations

from pathlib import Path

from moe_conformance.cli.errors import CommandError
from moe_conformance.machine import usable_cores

MOST_WORKERS_A_CORE = 16
"""Each imports torch, which takes some 300 MB and a second of a core; more only wait for each other."""


def parse_workers(text: str) -> int | None:
    """A number of processes; None for ``auto``."""
    if text == "auto":
        return None
    most = MOST_WORKERS_A_CORE * usable_cores()
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= most):
        raise CommandError(
            f"-n: expected auto or a number of worker processes from 1 to {most} ({MOST_WORKERS_A_CORE} a core), "
            f"got {text!r}"
        )
    return int(text)


def parse_file(option: str, text: str | None) -> Path | None:
    """A file to write in a folder that exists, checked before the work whose results go there."""
    if text is None:
        return None
    path = Path(text)
    if not text.strip() or path.is_dir() or not path.parent.is_dir():
        raise CommandError(f"{option}: expected a file in a folder that exists, got {text!r}")
    return path
