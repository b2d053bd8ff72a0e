"""Where the ranks of an in-process group meet: one exchange at a time, with every way of not meeting diagnosed."""

from __future__ import annotations

import threading
import time
from typing import Any

from moe_conformance.harness.turns import FreeForAll, Turns
from moe_contract import PeerTimeoutError


class CollectiveMismatchError(RuntimeError):
    """The ranks issued different collectives, or one ended without the one that its peers are in (RED-4)."""


class PeerFailedError(RuntimeError):
    """A peer raised; this rank can not finish its collective. The peer's own error is the one to report."""


class Rendezvous:
    """Exchanges one value per rank, as often as wanted.

    Args:
        size: the number of ranks.
        timeout_s: the longest wait for a peer, in seconds.
        turns: whose turn a rank gives up while it waits.
    """

    def __init__(self, size: int, timeout_s: float, turns: Turns | None = None) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self.turns = turns or FreeForAll()
        self._condition = threading.Condition()
        self._generation = 0
        self._waiting: dict[int, tuple[str, Any]] = {}
        self._results: dict[int, Any] = {}
        self._ended: set[int] = set()
        self._failure: BaseException | None = None

    def exchange(self, rank: int, call: str, value: Any) -> list[Any]:
        """Every rank's ``value`` in rank order, once all have come with the same ``call``.

        Raises:
            CollectiveMismatchError: another rank came with another call, or has ended.
            PeerFailedError: a peer raised.
            PeerTimeoutError: a peer did not come in time.
        """
        with self.turns.given_up(), self._condition:
            generation = self._generation
            self._waiting[rank] = (call, value)
            if len(self._waiting) == self.size:
                self._close_round()
            self._check_ended()
            self._wait(rank, call, generation)
            result = self._results[generation]
        if isinstance(result, Exception):
            raise result
        values: list[Any] = result
        return values

    def end(self, rank: int) -> None:
        """Rank is done; whoever still waits for it is told."""
        with self._condition:
            self._ended.add(rank)
            self._check_ended()

    def fail(self, error: BaseException) -> None:
        """A rank raised; every rank that waits now or later raises PeerFailedError."""
        with self._condition:
            self._failure = self._failure or error
            self._condition.notify_all()

    def _close_round(self) -> None:
        calls = {rank: call for rank, (call, _) in sorted(self._waiting.items())}
        if len(set(calls.values())) > 1:
            said = "; ".join(f"rank {rank}: {call}" for rank, call in calls.items())
            self._results[self._generation] = CollectiveMismatchError(f"ranks issued different collectives ({said})")
        else:
            self._results[self._generation] = [self._waiting[rank][1] for rank in range(self.size)]
        self._results.pop(self._generation - 2, None)
        self._waiting = {}
        self._generation += 1
        self._condition.notify_all()

    def _check_ended(self) -> None:
        if self._waiting and self._ended and self._failure is None:
            waiting = "; ".join(f"rank {rank}: {call}" for rank, (call, _) in sorted(self._waiting.items()))
            gone = ", ".join(str(rank) for rank in sorted(self._ended))
            self._failure = CollectiveMismatchError(
                f"rank {gone} ended without the collective its peers wait in ({waiting})"
            )
            self._condition.notify_all()

    def _wait(self, rank: int, call: str, generation: int) -> None:
        deadline = time.monotonic() + self.timeout_s
        while self._generation == generation:
            if isinstance(self._failure, CollectiveMismatchError):
                raise CollectiveMismatchError(str(self._failure))
            if self._failure is not None:
                raise PeerFailedError(f"rank {rank} waits in {call}, but a peer raised {self._failure!r}")
            left = deadline - time.monotonic()
            if left <= 0:
                missing = ", ".join(str(peer) for peer in range(self.size) if peer not in self._waiting)
                raise PeerTimeoutError(
                    f"rank {rank} waited {self.timeout_s:g} s in {call} for rank {missing}, which did not arrive"
                )
            self._condition.wait(left)
