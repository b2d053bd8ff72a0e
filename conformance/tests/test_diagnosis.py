"""Where a wrong value has a known cause, the message of its failure names it; where it has none, it claims none."""

from __future__ import annotations

import pytest

from moe_conformance.faults.catalogue import faults
from moe_conformance.faults.execution import run_fault

NAMED = {
    "last-row-read": "the last row was read as this slot's row",
    "bfloat16-in-a-buffer-labelled-float32": "the kernel writes 16-bit weights into a buffer labelled float32",
    "float32-weights-rounded": "float32 weights were rounded to bfloat16 before use",
    "scale-twice": "routed_scaling_factor was applied twice",
    "scale-forgotten": "routed_scaling_factor was not applied",
    "everything-scaled": "the residual was multiplied by routed_scaling_factor",
    "shared-twice": "the shared output was added twice",
    "shared-left-out": "the shared output was left out",
    "shared-scaled": "the shared output was multiplied by routed_scaling_factor",
    "last-rank-missing": "the contribution of rank 1 is missing",
    "own-part-twice": "was added twice",
    "nothing-reduced": "the contribution of rank 1 is missing",
    "reduced-twice": "the sum was reduced twice",
    "residual-left-out": "the residual was left out",
    "residual-on-every-rank": "the residual was added twice",
    "reads-the-map-slot-major": "the map was read slot-major, as [K, T]",
    "weight-not-applied": "the routing weight was not applied",
    "weight-applied-twice": "the routing weight was applied twice",
    "weights-in-reverse-slot-order": "stand in another order than its map entries",
    "weights-of-the-token-before": "the weights are those of the token before",
    "rows-already-weighted": "the row was multiplied by its routing weight",
    "down-bias-twice": "the expert's down bias is in the row twice",
    "down-bias-left-out": "the expert's down bias is missing from the row",
    "rows-keep-the-padded-width": "padded columns",
    "second-call-reads-the-first": "right when it is the only one",
    "traced-without-the-factor": "right when not",
    "two-routes-one-row": "one of the two routes' results was overwritten",
    "rounds-at-each-rank": "the result is rounded at more places than declared",
    "offset-in-int32": "wrapped in 32 bits",
}
"""Fault: what its failure says."""


@pytest.mark.parametrize("name", NAMED)
def test_cause_is_named(name: str) -> None:
    """The case that the report shows says what went wrong, not only that something did."""
    result = run_fault(faults()[name])
    assert result.killer is not None and NAMED[name] in result.killer.message, result.killer


@pytest.mark.parametrize("name", ["token-of-absent-slots-keeps-old-memory", "one-slot-in-a-thousand-lost"])
def test_unknown_cause_is_not_guessed(name: str) -> None:
    """A wrong value that no known fault explains is given with its place and its bound, and nothing more."""
    result = run_fault(faults()[name])
    assert result.killer is not None
    assert ";" not in result.killer.message and "expected" in result.killer.message
