"""Ranks of one process take turns: threads that compute at the same time only slow one another down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_WAIT_S = 0.05
"""After it a rank runs without a turn. A rank that holds its turn while it waits for a peer (by polling shared memory,
or asleep) must not stop that peer; 0.05 s is far longer than a rank of a small case computes."""


class Turns:
    """One turn for all ranks. It orders who computes when and never decides whether: a wait for it always ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._mine = threading.local()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Runs the body in this thread's turn, or without one where it does not come in time."""
        self._take()
        try:
            yield
        finally:
            self._give()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """Runs the body, a wait for other ranks, while they have the turn."""
        self._give()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        self._mine.held = self._lock.acquire(timeout=LONGEST_WAIT_S)

    def _give(self) -> None:
        if getattr(self._mine, "held", False):
            self._mine.held = False
            self._lock.release()


class FreeForAll(Turns):
    """No turns: every rank runs at once."""

    def _take(self) -> None:
        """Nothing to wait for."""

    def _give(self) -> None:
        """Nothing to hand on."""
