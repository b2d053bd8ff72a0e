"""A plug-in that is written against another interface: what it says of itself, or what its functions take."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

CUTOFF = 0.6
"""difflib's own: the share of letters in common from which two names count as the same one, misspelt."""


class PlugInError(TypeError):
    """A declaration or a signature that cannot be used; the message is one line that begins with the author's line."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(f"{place}: {message}" if place else message)


def declaration_mistakes(model: str, fields: Iterable[str], error: ValidationError, name: object) -> str:
    """One line for what pydantic says in several: each wrong field, what came and what was expected.

    Args:
        model: the declaration's class.
        fields: all fields that it has.
        error: what pydantic raised.
        name: the backend's name where the declaration gives one.
    """
    mistakes = list(dict.fromkeys(_mistake(dict(each), list(fields)) for each in error.errors(include_url=False)))
    who = f" of {name!r}" if isinstance(name, str) and name else ""
    return f"{model}{who}: {'; '.join(mistakes)} (help(moe_contract.{model}) lists the fields)"


def nearest(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the nearest known name, in whatever case; empty where none is near."""
    by_lower = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=CUTOFF)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


def _mistake(found: dict[str, Any], fields: list[str]) -> str:
    field = str(found["loc"][0]) if found["loc"] else "declaration"
    if found["type"] == "missing":
        return f"{field} is missing: add {field}=..."
    if found["type"] == "extra_forbidden":
        return f"there is no field {field!r}{nearest(field, fields)}"
    expected = found["msg"].removeprefix("Input should be ").replace("a valid frozenset", "a set such as {...}")
    got = found["input"]
    choices = str(found.get("ctx", {}).get("expected", "")).replace("'", "").replace(" or ", ", ").split(", ")
    suggestion = nearest(got, choices) if isinstance(got, str) else ""
    return f"{field}: got {_short(got)}, expected {expected}{suggestion}"


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
