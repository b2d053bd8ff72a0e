"""A violation is one line that says what was expected, what came and where."""

from __future__ import annotations

import pytest

from moe_contract import Violation


@pytest.mark.parametrize(("bound", "shown"), [(None, "expected 2"), (0.0078125, "expected 2, bound 0.00781")])
def test_bound_follows_what_was_expected(bound: float | None, shown: str) -> None:
    """The bound of a number is said where there is one, and the text of what was expected stays free of it."""
    violation = Violation(clause="MAP-4", field="residual_out", got="3.5", expected="2", bound=bound, rank=1, count=2)
    assert str(violation) == f"MAP-4: residual_out at rank 1: got 3.5, {shown} (2 places, first shown)"
    assert violation.expected == "2"
