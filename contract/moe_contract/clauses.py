"""The registry of clauses: what each says, who keeps it, since when, and why (``clauses.toml``)."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from moe_contract.declarations import RoundingProfile

Family = Literal["ROWS", "WGT", "MAP", "OUT", "SCALE", "SHARED", "DEFER", "RED", "NORM", "QUANT", "NUM", "CAP", "GRAPH"]


CUTOFF = 0.5
"""The share of letters in common from which an id is suggested. Below difflib's own 0.6, so that a family written out
finds its id: CAPABILITY-1 and CAP-1 share 0.59."""


class UnknownClauseError(LookupError):
    """No clause of this id; the one-line message suggests the nearest."""


class Clause(BaseModel):
    """One rule of the contract."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    """Its name for ever, such as ``MAP-4``; a released id never changes its meaning."""
    text: str = Field(min_length=1)
    """The rule."""
    family: Family
    """What it is about; the id's first part."""
    side: Literal["producer", "consumer", "both", "engine"]
    """Who has to keep it; ``both`` is producer and consumer, ``engine`` is the code that joins the two."""
    level: Literal["MUST", "SHOULD"]
    since: Literal["1.0", "1.1"]
    """The contract version that brought it."""
    profile: tuple[RoundingProfile, ...] = ()
    """The rounding profiles whose bound or bits it is judged by; empty where rounding plays no part."""
    real_cases: tuple[str, ...]
    """Public reports of breaches, as ``repository#number``."""
    why: str = Field(min_length=1)
    """What a breach does to a model."""
    look_first: str = Field(min_length=1)
    """Where the author of a kernel looks first."""

    @model_validator(mode="after")
    def _id_is_in_its_family(self) -> Clause:
        family, _, number = self.id.rpartition("-")
        if family != self.family or not number.isdecimal():
            raise ValueError(f"clause id {self.id!r} must be {self.family}-<number>")
        return self


@cache
def registry() -> Mapping[str, Clause]:
    """Every clause by id, in the order of the specification. Read once."""
    tables = tomllib.loads(files("moe_contract").joinpath("clauses.toml").read_text(encoding="utf-8"))
    return MappingProxyType({name: Clause(id=name, **table) for name, table in tables.items()})


def get_clause(clause_id: str) -> Clause:
    """The clause called ``clause_id``.

    Raises:
        UnknownClauseError: there is none; the message suggests the nearest id.
    """
    clauses = registry()
    if clause_id in clauses:
        return clauses[clause_id]
    near = difflib.get_close_matches(clause_id.upper(), clauses, n=1, cutoff=CUTOFF)
    suggestion = f"did you mean {near[0]!r}?" if near else f"ids look like {next(iter(clauses))!r}"
    raise UnknownClauseError(f"unknown clause {clause_id!r}; {suggestion} (families: {', '.join(families())})")


def families() -> Mapping[str, tuple[Clause, ...]]:
    """The clauses of each family, families and clauses in the order of the specification."""
    grouped: dict[str, tuple[Clause, ...]] = {}
    for clause in registry().values():
        grouped[clause.family] = (*grouped.get(clause.family, ()), clause)
    return grouped
