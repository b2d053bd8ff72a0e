"""What the checks share: taking an output apart without trusting it, and collecting what was found."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_contract.violations import Violation

ROWS = "gemm2_permuted"
WEIGHTS = "expert_weights"
MAP = "expanded_idx_to_permuted_idx"
TRIPLE = (ROWS, WEIGHTS, MAP)

ABSENT = object()
"""Stands for an attribute that is not there; None would be a value."""


def attribute(owner: object, name: str) -> object:
    """``owner.name``, or ABSENT where reading it fails in any way."""
    try:
        value: object = getattr(owner, name)
    except Exception:
        return ABSENT
    return value


def routed_of(output: object) -> object:
    """The routed part of an output: a wrapper's ``routed``, or the output itself."""
    if isinstance(output, Tensor):
        return output
    routed = attribute(output, "routed")
    return output if routed is ABSENT else routed


def is_readable(tensor: Tensor) -> bool:
    """Whether the tensor is dense and strided, so that shape, strides and address mean something."""
    return tensor.layout is torch.strided and not tensor.is_nested


def shape_text(tensor: Tensor) -> str:
    """Shape as ``[2, 3]``; a tensor without an ordinary shape by its layout."""
    return str(list(tensor.shape)) if is_readable(tensor) else f"a {tensor.layout} tensor"


class Findings:
    """The violations of one output, in the order found, and the fields they broke."""

    def __init__(self, rank: int | None = None) -> None:
        self.rank = rank
        self.violations: list[Violation] = []

    def add(self, clause: str, field: str, got: str, expected: str, hint: str = "") -> None:
        """Records that ``field`` breaks ``clause`` as a whole."""
        self.violations.append(
            Violation(clause=clause, field=field, got=got, expected=expected, hint=hint, rank=self.rank)
        )

    def add_at(
        self,
        clause: str,
        field: str,
        got: str,
        expected: str,
        *,
        token: int,
        slot: int,
        value: float | int | None = None,
        count: int = 1,
        hint: str = "",
    ) -> None:
        """Records that ``field`` breaks ``clause`` at (token, slot), the first of ``count`` places."""
        self.violations.append(
            Violation(
                clause=clause,
                field=field,
                got=got,
                expected=expected,
                hint=hint,
                rank=self.rank,
                token=token,
                slot=slot,
                value=value,
                count=count,
            )
        )

    def broken(self) -> frozenset[str]:
        """The fields that a later tier has no business reading."""
        return frozenset(violation.field for violation in self.violations)
