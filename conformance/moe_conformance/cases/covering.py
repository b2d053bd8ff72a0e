"""Covering arrays: few rows of sizes in which every two values of two axes still meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from allpairspy import AllPairs

Row = dict[str, Any]


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Rows in which every two values of two axes meet; where only one axis varies, one row for each of its values."""
    varied = {name: list(values) for name, values in axes.items() if len(values) > 1}
    fixed = {name: values[0] for name, values in axes.items() if len(values) == 1}
    if not varied:
        return [fixed]
    if len(varied) == 1:
        ((name, values),) = varied.items()
        return [{**fixed, name: value} for value in values]
    # Indices, since AllPairs compares values and a variant is a dictionary.
    rows = AllPairs([list(range(len(values))) for values in varied.values()])
    return [fixed | {name: varied[name][at] for name, at in zip(varied, row, strict=True)} for row in rows]


def largest_fitting(wanted: int, choices: Sequence[int], most: int) -> int:
    """``wanted`` where it is at most ``most``, else the largest choice that is; 1 where none is."""
    return wanted if wanted <= most else max((value for value in choices if 0 < value <= most), default=1)
