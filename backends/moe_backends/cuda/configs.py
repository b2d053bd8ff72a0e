"""Which form of the kernel runs a call of T tokens: the measured table, and how it becomes launch shapes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

from moe_contract import TailCapacity, UnsupportedError

VECTOR = 8
"""Elements of 16 bits in a 16-byte vector, the unit in which threads divide a token."""
WARP = 32
CLUSTERS = (1, 2, 4)
"""Blocks that may hold a token; the largest is kMaxCluster in kernels/sync.cuh."""
MAX_THREADS = 512
"""Of one block (kMaxWarps in kernels/sync.cuh)."""
HELD_ALONE = 2
"""Vectors a thread has of a token that one block holds alone (kHeldAlone in kernels/params.h); in a cluster one."""
MAX_HIDDEN_SIZE = max(CLUSTERS) * MAX_THREADS * VECTOR
"""A cluster holds one vector a thread."""
NO_LIMIT = 2**62
MAX_GROUPS = (2**31 - 1) // max(CLUSTERS)
"""Clusters in a grid."""


@dataclass(frozen=True)
class Form:
    """One row of the table.

    Attributes:
        max_tokens: the largest call it is used for.
        blocks: blocks that hold a token in registers: a cluster of 2 or 4, one vector a thread, or 1 alone, two
            vectors a thread. With peers only used for calls whose tokens are all resident at once. 0: a block alone
            that loops over tokens and vectors.
        vectors: 16-byte vectors a thread loops over; of a block that loops.
        two_shot: reduce-scatter by token and all-gather, instead of every rank sending to every other; of a block
            that loops.
    """

    max_tokens: int = NO_LIMIT
    blocks: int = 0
    vectors: int = 2
    two_shot: bool = False

    def __post_init__(self) -> None:
        """Refuses what no kernel exists for."""
        if self.blocks and (self.blocks not in CLUSTERS or self.two_shot):
            raise ValueError(f"cuda: a token is held by 1, 2 or 4 blocks, and such a form is one-shot, got {self}")

    @property
    def loops(self) -> bool:
        """Whether a thread loops over vectors, so that any number of tokens and any width will do."""
        return self.blocks == 0

    @property
    def vectors_per_thread(self) -> int:
        """16-byte vectors of a token that a thread has."""
        return self.vectors if self.loops else HELD_ALONE if self.blocks == 1 else 1

    def fits(self, hidden_size: int) -> bool:
        """Whether the threads cover a token of this size; those of a block that loops always do."""
        return self.loops or hidden_size <= self.blocks * MAX_THREADS * self.vectors_per_thread * VECTOR

    def threads(self, hidden_size: int) -> int:
        """Threads of one block for a hidden size, a multiple of the warp."""
        wanted = -(-hidden_size // (VECTOR * self.vectors_per_thread * max(1, self.blocks)))
        return min(MAX_THREADS, -(-wanted // WARP) * WARP)


@dataclass(frozen=True)
class Config:
    """A form with its launch shape (struct Config in kernels/launch.h)."""

    form: Form
    threads: int
    max_groups: int
    """Blocks or clusters of this rank that may be in flight."""
    max_groups_quant: int
    """The same with a quantised output."""

    @property
    def max_tokens(self) -> int:
        """The largest call this configuration takes when none is asked for by number."""
        if self.form.loops:
            return self.form.max_tokens
        return min(self.form.max_tokens, self.max_groups, self.max_groups_quant)

    def numbers(self) -> list[int]:
        """As the binding takes it."""
        form = self.form
        return [self.max_tokens, self.threads, form.blocks, int(form.two_shot), self.max_groups, self.max_groups_quant]


def _form(row: dict[str, Any]) -> Form:
    kind: Literal["held", "loop"] = row["form"]
    blocks = row["blocks"] if kind == "held" else 0
    return Form(row.get("max_tokens", NO_LIMIT), blocks, row.get("vectors", 2), row.get("two_shot", False))


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
        kind = f"clusters of {form.blocks} blocks" if form.blocks > 1 else "blocks"
        raise UnsupportedError(
            f"cuda: CAP-2: {sharing} ranks on one GPU wait for each other, but only {resident} {kind} are resident "
            "together; use fewer virtual ranks or a smaller hidden size",
            clause="CAP-2",
        )
    return limit


def usable(forms: Sequence[Form], ranks: int, capacity: TailCapacity) -> Iterator[Form]:
    """The rows that calls within a capacity can meet.

    Raises:
        UnsupportedError: the forms contradict the rank count, or none of them runs this hidden size.
    """
    found = False
    for form in forms:
        if form.two_shot and ranks == 1:
            raise UnsupportedError("cuda: a two-shot configuration needs at least 2 ranks")
        if not form.fits(capacity.hidden_size):
            continue
        found = True
        yield form
        if form.loops and form.max_tokens >= capacity.max_tokens:
            return
    if not found:
        raise UnsupportedError(f"cuda: no configuration runs a hidden size of {capacity.hidden_size}: {list(forms)}")
