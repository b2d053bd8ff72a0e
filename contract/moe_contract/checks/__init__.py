"""Checks of one output against the contract, in tiers: metadata reads no data, values reads the small tensors.

A later tier does not read what an earlier one found broken. Objects of any project are taken: only attributes count.
"""

from __future__ import annotations

from typing import Literal

from moe_contract.checks.expectation import Expectation
from moe_contract.checks.group import check_expert_parallel_group
from moe_contract.checks.metadata import check_metadata
from moe_contract.checks.values import check_values
from moe_contract.violations import ContractViolation, Violation

Tier = Literal["metadata", "values"]

__all__ = ["Expectation", "Tier", "check", "check_expert_parallel_group", "require"]


def check(output: object, expectation: Expectation, *, tier: Tier = "values") -> list[Violation]:
    """Every violation that can be seen in one rank's output, up to ``tier``; empty for a correct one.

    ``output`` is a finalized tensor, the pending triple, or a layer's output around either; anything else is itself a
    violation, never an exception. ``tier="metadata"`` reads no tensor data and does not synchronise.
    """
    found = check_metadata(output, expectation)
    if tier == "values":
        check_values(output, found)
    return found.violations


def require(output: object, expectation: Expectation, *, tier: Tier = "values") -> None:
    """As ``check``, for callers that stop at a violation.

    Raises:
        ContractViolation: with every violation found, one line each.
    """
    violations = check(output, expectation, tier=tier)
    if violations:
        raise ContractViolation(violations)
