"""How a broken clause is reported: one record, one exception."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict


class Violation(BaseModel):
    """One broken clause at one place. ``got`` and ``expected`` are text, so that a report needs no tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clause: str
    """Id in the clause registry, such as ``MAP-4``."""
    field: str
    """The field, argument or result it was seen in."""
    got: str
    expected: str
    bound: float | None = None
    """How far from ``expected`` rounding may lead at this place; None where nothing was held to a bound."""
    hint: str = ""
    """What this usually means, or what to do; empty when nothing is known."""
    rank: int | None = None
    token: int | None = None
    slot: int | None = None
    column: int | None = None
    value: float | int | None = None
    """The offending element, where there is one."""
    count: int = 1
    """How many elements broke the clause in the same way; the first is the one described."""

    def __str__(self) -> str:
        places = {"rank": self.rank, "token": self.token, "slot": self.slot, "column": self.column}
        where = [f"{name} {at}" for name, at in places.items() if at is not None]
        place = f" at {', '.join(where)}" if where else ""
        more = f" ({self.count} places, first shown)" if self.count > 1 else ""
        bound = f", bound {self.bound:.3g}" if self.bound is not None else ""
        hint = f"; {self.hint}" if self.hint else ""
        return f"{self.clause}: {self.field}{place}: got {self.got}, expected {self.expected}{bound}{more}{hint}"


class ContractViolation(ValueError):
    """Raised by callers that turn violations into an error; carries all of them."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__("\n".join(str(violation) for violation in self.violations))
