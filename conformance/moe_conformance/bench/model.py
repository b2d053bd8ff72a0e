"""What a bench writes: one row a configuration, typed and versioned. Everything printed or drawn is a view of it."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from moe_conformance.report.model import Environment

SCHEMA_VERSION: Literal[1] = 1


class Mode(StrEnum):
    """How the ranks of one GPU are timed."""

    SOLO = "solo"
    """one rank alone, its peers' contributions in place beforehand: the kernel's own cost."""
    CHAIN = "chain"
    """all ranks run free within a graph, each on its stream."""
    JOIN = "join"
    """as chain, with a fork and a join of all ranks around every step."""


class Cache(StrEnum):
    """What the last-level cache holds when a step begins."""

    COLD = "cold"
    """other rows, maps and outputs at each step, and 512 MiB read before each replay."""
    WARM = "warm"
    """the same inputs at each step."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Point(_Record):
    """One configuration that consumers are compared at."""

    mode: Mode
    cache: Cache
    tokens: int
    hidden_size: int
    top_k: int
    ranks: int
    dtype: Literal["bfloat16", "float16"]

    @property
    def label(self) -> str:
        """In one phrase."""
        return (
            f"T={self.tokens} H={self.hidden_size} K={self.top_k} N={self.ranks} {self.dtype} {self.mode} {self.cache}"
        )

    @property
    def effective_bytes(self) -> int:
        """Bytes of one rank without the exchange: K rows, shared output and residual read, residual and norm written;
        16-bit elements."""
        return (self.top_k + 4) * self.hidden_size * 2 * self.tokens


class BenchRow(Point):
    """One consumer at one point. A wrong result has no times."""

    consumer: str
    correct: bool
    median_us: float | None = None
    """of one step, over replays of a graph of many steps."""
    p10_us: float | None = None
    p90_us: float | None = None
    effective_tbps: float | None = None
    """Point.effective_bytes over the median, in TB/s."""
    share_of_copy: float | None = None
    """Of the copy bandwidth measured in the same run."""
    ratio_to_best: float | None = None
    """Median over the lowest median among the other consumers at this point; below 1 is faster than all of them."""

    @model_validator(mode="after")
    def _only_right_results_are_timed(self) -> Self:
        if self.correct is (self.median_us is None):
            raise ValueError(f"{self.consumer} {self.label}: a correct row has a median, a wrong one has none")
        return self


class Skipped(_Record):
    """A consumer that was not timed at a point, and why."""

    consumer: str
    point: str
    reason: str


class BenchResult(_Record):
    """One run of the bench."""

    schema_version: Literal[1] = SCHEMA_VERSION
    complete: bool
    """False: the run was stopped before the last point."""
    started: str
    """ISO 8601, UTC."""
    command: str
    environment: Environment
    driver: str
    copy_tbps: float
    """Bytes read and written by a copy of 2 GiB over its median time."""
    empty_node_us: float
    """A kernel that does nothing, as a node of a graph of 100."""
    host_call_us: dict[str, float]
    """What one eager call costs the host, by consumer: T = 1, one rank, nothing waited for."""
    rows: tuple[BenchRow, ...]
    skipped: tuple[Skipped, ...] = ()


def with_ratios(rows: list[BenchRow]) -> tuple[BenchRow, ...]:
    """The rows with ``ratio_to_best`` filled in where another consumer was timed at the same point."""
    medians: dict[tuple[object, ...], dict[str, float]] = {}
    for row in rows:
        if row.median_us is not None:
            medians.setdefault(_point(row), {})[row.consumer] = row.median_us
    found = []
    for row in rows:
        others = [value for name, value in medians.get(_point(row), {}).items() if family(name) != family(row.consumer)]
        ratio = round(row.median_us / min(others), 3) if row.median_us is not None and others else None
        found.append(row.model_copy(update={"ratio_to_best": ratio}))
    return tuple(found)


def _point(row: BenchRow) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in Point.model_fields)


def family(consumer: str) -> str:
    """``cuda`` and ``cuda-pdl`` are one kernel launched in two ways, not competitors."""
    return consumer.removesuffix("-pdl")
