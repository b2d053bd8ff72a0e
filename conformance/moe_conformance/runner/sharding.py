"""``--shard I/N``: a split of the ids that is the same on every machine."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


class ShardError(ValueError):
    """Not a shard; the message is one line for the user."""


@dataclass(frozen=True)
class Shard:
    """Part ``index`` (from 1) of ``count``."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The shard written as ``I/N``; raises ShardError."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise ShardError(f"expected a shard such as 1/4, got {text!r}")
        if not 1 <= int(index) <= int(count):
            raise ShardError(f"shard {text} does not exist: I/N counts from 1/{count} to {count}/{count}")
        return cls(int(index), int(count))

    def holds(self, case_id: str) -> bool:
        """Whether the case is in this part. By hash, so that a new case moves no other one between machines."""
        digest = hashlib.sha256(case_id.encode()).digest()
        return int.from_bytes(digest[:8], "big") % self.count == self.index - 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"
