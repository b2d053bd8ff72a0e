"""Which form of the kernel runs a call of T tokens: the measured table, and how it becomes launch shapes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from moe_contract import UnsupportedError

VECTOR = 8
"""Elements of 16 bits in a 16-byte vector, the unit in which threads divide a token."""
WARP = 32
CLUSTER = 4
"""Blocks that share a token in the cluster form (kClusterSize in kernels/tail.cuh)."""
MAX_THREADS = 512
"""Of one block (kMaxWarps in kernels/sync.cuh)."""
MAX_HIDDEN_SIZE = CLUSTER * MAX_THREADS * VECTOR
"""The cluster form holds one vector a thread."""
NO_LIMIT = 2**62


@dataclass(frozen=True)
class Form:
    """One row of the table.

    Attributes:
        max_tokens: the largest call it is used for.
        cluster: CLUSTER blocks share a token, instead of one block having it alone.
        vectors: 16-byte vectors a thread loops over; of a block alone.
        two_shot: reduce-scatter by token and all-gather, instead of every rank sending to every other.
    """

    max_tokens: int = NO_LIMIT
    cluster: bool = False
    vectors: int = 4
    two_shot: bool = False

    def threads(self, hidden_size: int) -> int:
        """Threads of one block for a hidden size, a multiple of the warp."""
        share = CLUSTER if self.cluster else self.vectors
        wanted = -(-hidden_size // (VECTOR * share))
        return min(MAX_THREADS, -(-wanted // WARP) * WARP)

    @property
    def blocks(self) -> int:
        """Blocks that share a token."""
        return CLUSTER if self.cluster else 1


@dataclass(frozen=True)
class Config:
    """A form with its launch shape (struct Config in kernels/launch.h)."""

    form: Form
    threads: int
    max_groups: int

    def numbers(self) -> list[int]:
        """As the binding takes it."""
        return [self.form.max_tokens, self.threads, self.form.blocks, int(self.form.two_shot), self.max_groups]


def _form(row: dict[str, Any]) -> Form:
    kind: Literal["cluster", "block"] = row["form"]
    return Form(row.get("max_tokens", NO_LIMIT), kind == "cluster", row.get("vectors", 4), row.get("two_shot", False))


@lru_cache(maxsize=1)
def table() -> dict[int, tuple[Form, ...]]:
    """The rows of configs.toml by number of ranks."""
    data = tomllib.loads(files("moe_backends").joinpath("cuda", "configs.toml").read_text())
    return {ranks: tuple(map(_form, entry["rows"])) for entry in data["config"] for ranks in entry["ranks"]}


def group_limit(resident: int, sharing: int, form: Form) -> int:
    """How many blocks or clusters one rank may have in flight, where ``sharing`` ranks wait for each other on one GPU.

    Raises:
        UnsupportedError: not even one each fits, so that a rank could wait for one that the GPU has no room for.
    """
    limit = resident // sharing
    if limit < 1:
        kind = f"clusters of {CLUSTER} blocks" if form.cluster else "blocks"
        raise UnsupportedError(
            f"cuda: CAP-2: {sharing} ranks on one GPU wait for each other, but only {resident} {kind} are resident "
            "together; use fewer virtual ranks or a smaller hidden size"
        )
    return limit


def usable(forms: Sequence[Form], ranks: int, max_tokens: int) -> Iterable[Form]:
    """The rows that calls of up to ``max_tokens`` can meet; the last of them covers every call."""
    for form in forms:
        if form.two_shot and ranks == 1:
            raise UnsupportedError("cuda: a two-shot configuration needs at least 2 ranks")
        yield form
        if form.max_tokens >= max_tokens:
            return
