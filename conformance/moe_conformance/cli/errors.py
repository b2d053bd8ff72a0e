"""What the commands raise for a user's mistake."""

from __future__ import annotations

from collections.abc import Iterable


class CommandError(Exception):
    """Wrong usage; the message is one line: what was expected, what came, what to do."""


def one_line(text: object) -> str:
    """The text without line breaks."""
    return " ".join(str(text).split())


def unknown(what: str, name: str, known: Iterable[str]) -> CommandError:
    """The error for a name that does not exist, with the nearest one that does."""
    from moe_contract.plugin_errors import nearest  # here, since --help must not import torch

    names = list(known)
    return CommandError(f"unknown {what} {name!r}{nearest(name, names)} (known: {', '.join(names)})")
