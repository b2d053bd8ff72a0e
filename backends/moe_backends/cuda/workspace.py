"""The memory of one opened tail: receive slots, epochs, the report of a lost peer. Allocated once.

The protocol that makes two generations of slots enough is proved in docs/cuda-consumer.md.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_contract import PeerTimeoutError, RankGroup, TailCapacity

GENERATIONS = 2
"""Receive slots per token and source (kGenerations in kernels/params.h)."""
ARMED_BYTE = 0xFF
"""An armed slot is all ones: a NaN pattern that no conversion from float32 gives (kArmed)."""
MAX_SLOT_TOKENS = 4096
"""Tokens of one launch. A longer call takes several; at 4096 a further launch costs about 1 % (docs)."""
MAX_SLOT_BYTES = 512 << 20
"""Receive memory that a rank spends at most, unless 64 tokens need more."""
MIN_SLOT_TOKENS = 64


class _Report(ctypes.Structure):
    """struct Report in kernels/params.h."""

    _fields_ = (
        ("raised", ctypes.c_uint32),
        ("rank", ctypes.c_uint32),
        ("peer", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
        ("token", ctypes.c_uint64),
    )


def slot_tokens(capacity: TailCapacity, ranks: int) -> int:
    """Tokens that the receive slots hold; the same on every rank, since capacity and ranks are."""
    if ranks == 1:
        return capacity.max_tokens
    per_token = slot_bytes(1, capacity.hidden_size, ranks, capacity.dtype.itemsize)
    return min(capacity.max_tokens, MAX_SLOT_TOKENS, max(MIN_SLOT_TOKENS, MAX_SLOT_BYTES // per_token))


def slot_bytes(tokens: int, hidden_size: int, ranks: int, itemsize: int = 2) -> int:
    """Bytes of one rank's receive slots: a Python integer, so it cannot overflow."""
    return GENERATIONS * (ranks - 1) * tokens * hidden_size * itemsize


@dataclass
class Workspace:
    """One rank's part of the workspace.

    Attributes:
        group: the ranks it was allocated with.
        tokens: token slots.
        slots: every rank's receive slots, uint8; empty at one rank.
        counters: int32 ``[tokens + 1]``: the epoch of each token slot, and the word that ends all waits.
        report: pinned bytes that the first wait to run out fills.
        stall: int64 ``[3]``, nanoseconds; read by builds with test hooks only.
    """

    group: RankGroup
    tokens: int
    slots: list[Tensor]
    counters: Tensor
    report: Tensor
    stall: Tensor
    _view: _Report = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """A view of the report, so that reading it costs no tensor operation."""
        self._view = _Report.from_address(self.report.data_ptr())

    @property
    def num_bytes(self) -> int:
        """Device memory of this rank."""
        own = self.slots[self.group.rank].numel() if self.slots else 0
        return own + self.counters.numel() * self.counters.element_size() + self.stall.numel() * 8

    def memory(self) -> list[int]:
        """Addresses of epochs, the ending word, the report and the stalls, as the binding takes them."""
        epochs = self.counters.data_ptr()
        return [epochs, epochs + 4 * self.tokens, self.report.data_ptr(), self.stall.data_ptr()]

    def rearm(self) -> None:
        """Every slot armed, every epoch 0, on the current stream. For open(), and after solo runs; collective in
        effect: no rank may be between two calls that another has not begun."""
        if self.slots:
            self.slots[self.group.rank].fill_(ARMED_BYTE)
        self.counters.zero_()

    def raise_if_lost(self) -> None:
        """Raises PeerTimeoutError once a wait of this rank has run out; such a tail cannot be used again."""
        if self._view.raised:
            seen = self._view
            raise PeerTimeoutError(
                f"RED-6: rank {seen.rank} waited in vain for rank {seen.peer} at token {seen.token} "
                f"(epoch {seen.epoch} of its slot); close the tail on every rank and open a new one"
            )


def allocate(group: RankGroup, capacity: TailCapacity) -> Workspace:
    """The workspace of one rank, armed. Collective at more than one rank; returns when every rank is ready."""
    tokens = slot_tokens(capacity, group.size)
    size = slot_bytes(tokens, capacity.hidden_size, group.size, capacity.dtype.itemsize)
    workspace = Workspace(
        group=group,
        tokens=tokens,
        slots=group.peer_memory(size) if group.size > 1 else [],
        counters=torch.zeros(tokens + 1, dtype=torch.int32, device=group.device),
        report=torch.zeros(ctypes.sizeof(_Report), dtype=torch.uint8, pin_memory=True),
        stall=torch.zeros(3, dtype=torch.int64, device=group.device),
    )
    workspace.rearm()
    torch.cuda.current_stream(group.device).synchronize()
    return workspace
