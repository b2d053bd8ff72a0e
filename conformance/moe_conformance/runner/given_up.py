"""Backends that crash or hang again and again: after a few times the rest of their cases is left out.

Every crash costs a new worker and every hang its whole time limit, so a backend that always does it would take hours
to say the same thing. The controller writes such backends to a file; the workers read it before each case.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

MOST_STRIKES = 3
"""Once may be one shape's fault and twice two shapes'; more would be said again for up to 90 s each."""


class Backends(NamedTuple):
    """What one case runs: a producer, a consumer, or both."""

    producer: str | None
    consumer: str | None

    @property
    def parts(self) -> tuple[Backends, ...]:
        """The pair itself and each side alone: a pair cannot work where one of its sides does not."""
        alone = (Backends(self.producer, None), Backends(None, self.consumer))
        return tuple(dict.fromkeys((self, *(part for part in alone if any(part)))))

    def __str__(self) -> str:
        return " x ".join(name for name in self if name)


class Strikes:
    """The controller's count; writes the file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._count: Counter[Backends] = Counter()

    def add(self, backends: Backends) -> None:
        """One more crash or hang."""
        self._count[backends] += 1
        if self._count[backends] == MOST_STRIKES:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(f"{backends.producer or ''}\t{backends.consumer or ''}\n")

    def reason(self, backends: Backends) -> str:
        """Why cases of these backends were left out; empty when they were not."""
        for part in backends.parts:
            if self._count[part] >= MOST_STRIKES:
                return f"left out after {self._count[part]} cases of {part} had crashed or hung"
        return ""


def read(file: Path) -> set[Backends]:
    """What the controller has written so far."""
    if not file.exists():
        return set()
    lines = file.read_text(encoding="utf-8").splitlines()
    return {Backends(*(name or None for name in line.split("\t"))) for line in lines if line.count("\t") == 1}
