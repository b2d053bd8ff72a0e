"""N ranks in one process, a thread each; on a GPU each has its own stream (virtual ranks)."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from moe_conformance.harness.rendezvous import CollectiveMismatchError, PeerFailedError, Rendezvous
from moe_conformance.harness.turns import FreeForAll, Turns
from moe_conformance.time_limits import CASE_TIMEOUT_S
from moe_contract import PeerTimeoutError

T = TypeVar("T")


class HungRanksError(RuntimeError):
    """Ranks that did not return in time, with the line of code each was in."""


class RankExitError(RuntimeError):
    """A rank raised what would end the program, such as SystemExit or KeyboardInterrupt; ``original`` is that."""

    def __init__(self, original: BaseException) -> None:
        super().__init__(f"a rank raised {type(original).__name__}")
        self.original = original


class ThreadRankGroup:
    """A RankGroup whose ranks are threads of this process. Records the collectives of its rank in ``trace``."""

    def __init__(self, rank: int, rendezvous: Rendezvous, device: torch.device) -> None:
        self.rank = rank
        self.size = rendezvous.size
        self.device = device
        self.timeout_s = rendezvous.timeout_s
        self.trace: list[str] = []
        self._rendezvous = rendezvous

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over ranks in order, rounded to the tensor's dtype at each rank; a new tensor."""
        parts = self._exchange("all_reduce", tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, as it was at the call."""
        return self._exchange("all_gather", tensor)

    def barrier(self) -> None:
        """Returns when every rank has come."""
        self.trace.append("barrier")
        self._rendezvous.exchange(self.rank, "barrier", None)

    def peer_memory(self, num_bytes: int) -> list[Tensor]:
        """One zeroed uint8 buffer a rank, shared by all ranks."""
        call = f"peer_memory({num_bytes})"
        self.trace.append(call)
        mine = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        self._synchronize()
        return list(self._rendezvous.exchange(self.rank, call, mine))

    def _exchange(self, kind: str, tensor: Tensor) -> list[Tensor]:
        call = f"{kind}({list(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')})"
        self.trace.append(call)
        # The rank may write its tensor again as soon as the call returns, so peers get a copy of now.
        copy = tensor.detach().clone()
        self._synchronize()
        return list(self._rendezvous.exchange(self.rank, call, copy))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class _Ranks(Generic[T]):
    """One run: the threads, their results and what went wrong."""

    def __init__(
        self, function: Callable[[ThreadRankGroup], T], groups: list[ThreadRankGroup], meet: Rendezvous
    ) -> None:
        self.function = function
        self.results: dict[int, T] = {}
        self.errors: dict[int, BaseException] = {}
        self.meet = meet
        self.threads = {
            group.rank: threading.Thread(target=self._run, args=(group,), daemon=True, name=f"rank-{group.rank}")
            for group in groups
        }

    def _run(self, group: ThreadRankGroup) -> None:
        try:
            with torch.no_grad(), self.meet.turns.turn(), _own_stream(group.device):
                self.results[group.rank] = self.function(group)
                group._synchronize()
            self.meet.end(group.rank)
        except BaseException as error:  # a backend may raise anything, SystemExit included
            self.errors[group.rank] = error
            self.meet.fail(error)

    def join(self, timeout_s: float) -> None:
        """Starts the threads and waits for them; HungRanksError after ``timeout_s`` seconds in all."""
        deadline = time.monotonic() + timeout_s
        for thread in self.threads.values():
            thread.start()
        for thread in self.threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        hung = {rank: thread for rank, thread in self.threads.items() if thread.is_alive()}
        if hung and not self.errors:
            where = "; ".join(f"rank {rank} {_position(thread)}" for rank, thread in hung.items())
            raise HungRanksError(f"no result after {timeout_s:g} s: {where}")


def _own_stream(device: torch.device) -> Any:
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    return torch.cuda.stream(stream)


def _position(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "already gone"
    innermost = traceback.extract_stack(frame)[-1]
    return f"in {innermost.name} ({innermost.filename}:{innermost.lineno})"


def _primary(errors: dict[int, BaseException]) -> BaseException:
    """The error that caused the others: a rank's own before what its peers saw of it."""
    induced: tuple[type[BaseException], ...] = (PeerFailedError, CollectiveMismatchError, PeerTimeoutError)
    own = [error for _, error in sorted(errors.items()) if not isinstance(error, induced)]
    told = [error for _, error in sorted(errors.items()) if not isinstance(error, PeerFailedError)]
    return (own or told or list(errors.values()))[0]


def run_ranks(
    function: Callable[[ThreadRankGroup], T],
    size: int,
    *,
    device: torch.device | str = "cpu",
    timeout_s: float = CASE_TIMEOUT_S,
    peer_timeout_s: float | None = None,
    absent: frozenset[int] = frozenset(),
) -> list[T]:
    """Runs ``function(group)`` on every rank and returns the results in rank order.

    Args:
        function: the code of one rank.
        size: the number of ranks.
        device: where the group's memory is.
        timeout_s: after it, ranks that have not returned are said to hang.
        peer_timeout_s: the group's own limit for one wait; ``timeout_s`` where not given.
        absent: ranks that are never started (RED-6).

    Raises:
        HungRanksError: a rank neither returned nor raised in time; its thread is abandoned.
        RankExitError: the first failing rank raised SystemExit, KeyboardInterrupt or the like.
        Exception: whatever else the first failing rank raised.
    """
    # On a GPU a rank may wait inside a kernel for what its peers have yet to launch, so nobody there waits for a turn.
    turns = Turns() if torch.device(device).type == "cpu" else FreeForAll()
    meet = Rendezvous(size, peer_timeout_s or timeout_s, turns)
    groups = [ThreadRankGroup(rank, meet, torch.device(device)) for rank in range(size) if rank not in absent]
    ranks = _Ranks(function, groups, meet)
    depth = sys.getrecursionlimit()
    try:
        ranks.join(timeout_s)
    finally:
        sys.setrecursionlimit(depth)  # the interpreter's, so a backend that lowers it would end the suite
    if ranks.errors:
        primary = _primary(ranks.errors)
        # The program is not a backend's to end: raised here as it is, it would stop the run as Ctrl-C does.
        raise primary if isinstance(primary, Exception) else RankExitError(primary) from primary
    return [ranks.results[group.rank] for group in groups]
