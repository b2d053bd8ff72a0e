"""An in-process rank group of threads, and lattice cases whose every intermediate sum is exact."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from moe_contract import MoEOutput, PeerTimeoutError, UnfinalizedMoEOutput

Result = TypeVar("Result")
PEER_WAIT_S = 20.0
"""Longest wait of a test rank for its peers: far above the milliseconds that a healthy case takes."""


@dataclass
class _Meeting:
    """What the ranks of one group share."""

    size: int
    barrier: threading.Barrier = field(init=False)
    slots: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=PEER_WAIT_S)
        self.slots = [torch.empty(0)] * self.size


@dataclass
class ThreadGroup:
    """One rank's view of a group whose ranks are threads of this process. Counts its collectives."""

    rank: int
    meeting: _Meeting
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = PEER_WAIT_S
    collectives: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Ranks in the group."""
        return self.meeting.size

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order."""
        self.collectives.append("all_gather")
        return self._exchange(tensor)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum in rank order, rounded at each rank."""
        self.collectives.append("all_reduce")
        first, *rest = self._exchange(tensor)
        total = first.clone()
        for part in rest:
            total = total + part
        return total

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.collectives.append("barrier")
        self._wait()

    def peer_memory(self, num_bytes: int) -> list[Tensor]:
        """One zeroed buffer per rank, visible to all."""
        self.collectives.append("peer_memory")
        return self._exchange(torch.zeros(num_bytes, dtype=torch.uint8, device=self.device))

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self.meeting.slots[self.rank] = tensor
        self._wait()
        gathered = list(self.meeting.slots)
        self._wait()
        return gathered

    def _wait(self) -> None:
        try:
            self.meeting.barrier.wait()
        except threading.BrokenBarrierError:
            raise PeerTimeoutError(f"rank {self.rank}: a peer did not arrive within {self.timeout_s} s") from None


def thread_groups(size: int) -> list[ThreadGroup]:
    """The views of ``size`` ranks onto one group."""
    meeting = _Meeting(size)
    return [ThreadGroup(rank, meeting) for rank in range(size)]


def run_ranks(groups: list[ThreadGroup], body: Callable[[ThreadGroup], Result]) -> list[Result]:
    """``body`` once per rank, each in its thread; results in rank order, the first rank's exception raised."""
    with ThreadPoolExecutor(len(groups)) as pool:
        futures = [pool.submit(body, group) for group in groups]
        return [future.result() for future in futures]


def lattice(generator: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, unit: float = 1.0) -> Tensor:
    """Random integers of -2..2 times ``unit``: few bits, so that short sums of products are exact in 16 bits."""
    return (torch.randint(-2, 3, shape, generator=generator) * unit).to(dtype)


def random_map(
    generator: torch.Generator, num_tokens: int, top_k: int, absent: float, spare_rows: int
) -> tuple[Tensor, int]:
    """A contract-keeping map with a share of -1 slots, and P: distinct rows in random order, some never named."""
    num_rows = num_tokens * top_k + spare_rows
    rows = torch.randperm(num_rows, generator=generator)[: num_tokens * top_k].view(num_tokens, top_k)
    gone = torch.rand(num_tokens, top_k, generator=generator) < absent
    return torch.where(gone, -1, rows).to(torch.int32), num_rows


def lattice_output(
    seed: int,
    num_tokens: int,
    top_k: int,
    hidden_size: int,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None = None,
    scale: float = 2.0,
    absent: float = 0.2,
) -> MoEOutput:
    """One rank's output on the lattice; rows that no entry names, and weights of absent slots, hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    index_map, num_rows = random_map(generator, num_tokens, top_k, absent, spare_rows=3)
    rows = lattice(generator, (num_rows, hidden_size), dtype)
    unnamed = torch.ones(num_rows, dtype=torch.bool)
    unnamed[index_map[index_map >= 0].long()] = False
    rows[unnamed] = float("nan")
    weights = lattice(generator, (num_tokens, top_k), weights_dtype or dtype, unit=0.5)
    weights[index_map < 0] = float("nan")
    shared = lattice(generator, (num_tokens, hidden_size), dtype)
    return MoEOutput(UnfinalizedMoEOutput(rows, weights, index_map), shared, scale)
