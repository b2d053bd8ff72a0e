"""Values of options that several commands take; each raises CommandError in one line."""

from __future__ import annotations

from pathlib import Path

from moe_conformance.cli.errors import CommandError


def parse_workers(text: str) -> int | None:
    """A number of processes; None for ``auto``."""
    if text == "auto":
        return None
    if not (text.isdecimal() and int(text) > 0):
        raise CommandError(f"-n: expected auto or a number of worker processes from 1, got {text!r}")
    return int(text)


def parse_file(option: str, text: str | None) -> Path | None:
    """A file to write in a folder that exists, checked before the work whose results go there."""
    if text is None:
        return None
    path = Path(text)
    if not text.strip() or path.is_dir() or not path.parent.is_dir():
        raise CommandError(f"{option}: expected a file in a folder that exists, got {text!r}")
    return path
