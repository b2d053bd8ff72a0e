"""The protocols a backend implements. A backend is SPMD: code for one rank; the harness runs N of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from moe_contract.config import MoEConfig
from moe_contract.declarations import ConsumerDeclaration, ProducerDeclaration
from moe_contract.layer import MoELayer, PrecomputedRouting
from moe_contract.outputs import MoEOutput, UnfinalizedMoEOutput
from moe_contract.quant import QuantRecipe


class UnsupportedError(RuntimeError):
    """A backend says that it cannot do what was asked, with the reason (CAP-1, CAP-2). Never a wrong number.

    Args:
        reason: one line.
        clause: the id of the clause that it refuses by, for callers that decide by it: CAP-1 means that another size
            or form may do, CAP-2 that this machine will not. None where that is not told.
    """

    def __init__(self, *reason: object, clause: str | None = None) -> None:
        super().__init__(*reason)
        self.clause = clause


class PeerTimeoutError(RuntimeError):
    """A peer did not arrive within the group's time limit (RED-6)."""


class RankGroup(Protocol):
    """One rank's view of the ranks that a tail reduces over. Every method but the attributes is collective."""

    rank: int
    size: int
    device: torch.device
    timeout_s: float
    """Longest wait for a peer, in seconds; after it a collective raises PeerTimeoutError."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """A new tensor: the sum over ranks in order 0..N-1, rounded to the tensor's dtype at each rank."""
        ...

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order. Read-only."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...

    def peer_memory(self, num_bytes: int) -> list[Tensor]:
        """One uint8 buffer of ``num_bytes`` per rank, zeroed, each visible to every rank; entry r belongs to rank r."""
        ...


@dataclass(frozen=True)
class TailCapacity:
    """The largest call that a tail is opened for; a larger one is refused before anything is launched (CAP-1)."""

    max_tokens: int
    """Largest T."""
    hidden_size: int
    """H of every call."""
    top_k: int
    """K of every call; a finalized tensor has none."""
    dtype: torch.dtype
    """The activation dtype, of every call."""


@dataclass(frozen=True)
class TailOutput:
    """What a tail returns.

    Attributes:
        residual_out: ``[T, H]`` activation dtype; the reduced sum plus the residual.
        norm_out: ``[T, H]`` activation dtype; its RMSNorm.
        quant_out, quant_scale: as the recipe's format says; None without a recipe.
    """

    residual_out: Tensor
    norm_out: Tensor
    quant_out: Tensor | None = None
    quant_scale: Tensor | None = None


class LoadedProducer(Protocol):
    """A producer with its weights prepared."""

    def __call__(
        self, hidden_states: Tensor, router_logits: Tensor | PrecomputedRouting
    ) -> Tensor | UnfinalizedMoEOutput:
        """``hidden_states [T, H]``, ``router_logits [T, E]`` to the routed output of this rank."""
        ...


@runtime_checkable
class Producer(Protocol):
    """A MoE kernel: prepares a layer's weights once, then runs it."""

    @property
    def declaration(self) -> ProducerDeclaration:
        """What it says of itself."""
        ...

    def load(self, layer: MoELayer, config: MoEConfig) -> LoadedProducer:
        """Prepares one rank's part of a layer. ``config`` is read again at every call (DEFER-2)."""
        ...


class Tail(Protocol):
    """An opened consumer: one rank's end of the fused tail."""

    def __call__(
        self,
        output: MoEOutput,
        residual: Tensor,
        norm_weight: Tensor,
        *,
        eps: float,
        weight_bias: float = 0.0,
        quant: QuantRecipe | None = None,
    ) -> TailOutput:
        """Top-k sum, scale, shared output, reduction, residual and RMSNorm of one layer. Collective."""
        ...

    def close(self) -> None:
        """Releases the workspace."""
        ...


@runtime_checkable
class Consumer(Protocol):
    """A fused tail: allocates its workspace once, then runs."""

    @property
    def declaration(self) -> ConsumerDeclaration:
        """What it says of itself."""
        ...

    def open(self, group: RankGroup, capacity: TailCapacity) -> Tail:
        """Allocates the workspace. Collective."""
        ...


@runtime_checkable
class SoloConsumer(Protocol):
    """A consumer of which one rank can be timed alone, without waiting for peers: what a bench calls solo mode."""

    def open_solo(self, group: RankGroup, capacity: TailCapacity, published: list[Tensor]) -> Tail:
        """A tail of ``group.rank`` that never waits and can be called any number of times.

        ``published``: the contribution ``[T, H]`` of every rank, in place as if the peers had sent it before each call.
        Every rank's contribution is the same, so that a kernel may as well be made to send to itself.

        Raises:
            UnsupportedError: this cannot be done at this size.
        """
        ...


@runtime_checkable
class Gated(Protocol):
    """A producer or consumer that can tell, before anything is loaded, that a machine cannot run it (CAP-2)."""

    def unavailable(self, device: str) -> str:
        """Why it cannot run on this machine's ``cpu`` or ``cuda`` device, in one phrase; empty where it can."""
        ...


@dataclass(frozen=True)
class Installation:
    """What a backend finds of the package that it calls."""

    package: str
    """The distribution, such as ``flashinfer-python``."""
    version: str
    """Empty where it is not installed."""
    problems: tuple[str, ...] = ()
    """One line for each call of the backend that this version would not take."""


@runtime_checkable
class Installed(Protocol):
    """A backend that can compare its calls with the package that is installed, without making them."""

    def installation(self) -> Installation:
        """What is installed, and which calls would fail."""
        ...


@dataclass(frozen=True)
class Backend:
    """A producer and a consumer under one name; what an entry point may load to, besides either alone."""

    producer: Producer | None = None
    consumer: Consumer | None = None
