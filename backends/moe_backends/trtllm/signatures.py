"""The signatures of the entry points in every checked wheel, as they were read (``signatures.json``)."""

from __future__ import annotations

import inspect
import json
from functools import cache
from importlib.resources import files

from .versions import Version

FILE = "signatures.json"
Recorded = dict[str, list[list[str]]]
"""Function name to its parameters: name, default as source text (absent: required), kind (absent: positional)."""


@cache
def recorded() -> dict[Version, Recorded]:
    """Each version whose wheel was read, oldest first, with its signatures."""
    text = files("moe_backends.trtllm").joinpath(FILE).read_text(encoding="utf-8")
    found: dict[str, Recorded] = json.loads(text)
    current: Recorded = {}
    result = {}
    for version, changes in found.items():
        current = {**current, **changes}
        result[Version.parse(version)] = current
    return result


def nearest(version: Version) -> Version:
    """The newest checked version that is not newer; the oldest where there is none."""
    versions = list(recorded())
    return max((each for each in versions if each <= version), default=versions[0])


def signature(version: Version, function: str) -> inspect.Signature:
    """The signature of ``function`` in this version, with defaults as source text; KeyError where it has none."""
    return inspect.Signature([_parameter(*parameter) for parameter in recorded()[nearest(version)][function]])


def _parameter(name: str, default: str = "", kind: str = "") -> inspect.Parameter:
    where = inspect.Parameter.KEYWORD_ONLY if kind == "keyword" else inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, where, default=default or inspect.Parameter.empty)
