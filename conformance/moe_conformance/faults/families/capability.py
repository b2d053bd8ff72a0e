"""CAP: limits that are not kept, kept too early or computed in 32 bits, and devices."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.faults import delta_producer, plain_tail
from moe_conformance.faults.bases import base_producer
from moe_conformance.faults.delta_producer import Call
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail
from moe_contract import (
    MoEConfig,
    MoELayer,
    MoEOutput,
    RankGroup,
    TailCapacity,
    TailOutput,
    UnfinalizedMoEOutput,
    UnsupportedError,
)

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)
producer_fault = partial(delta_producer.producer_fault, into=FAULTS)


class _OpensAnything(PlainTail):
    """Is opened whatever the declaration says."""

    @classmethod
    def may_open(cls, group: RankGroup, capacity: TailCapacity) -> bool:
        """Always, on a device with data."""
        return group.device.type != "meta"


@consumer_fault("CAP-1", bugs=("flashinfer#1986",), smallest="one token above max_tokens")
class WrongBeyondItsTokens(_OpensAnything):
    """At most 24 tokens are declared; of more the first 24 are right."""

    declares: ClassVar[dict[str, Any]] = {"max_tokens": 24}

    def local(self, output: MoEOutput) -> Tensor:
        """The rest is never computed."""
        local = super().local(output)
        local[24:] = 0
        return local


@consumer_fault("CAP-1", bugs=("vllm#46643",), smallest="K one above max_top_k")
class SlotsBeyondItsTopKLost(_OpensAnything):
    """At most 8 slots are declared; of more the first 8 are summed."""

    declares: ClassVar[dict[str, Any]] = {"max_top_k": 8}

    def terms(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """The first eight."""
        return super().terms(routed)[:, :8]


@consumer_fault("CAP-1", bugs=("flashinfer#1223",), smallest="T = max_tokens")
class WorkspaceSizeInInt32(PlainTail):
    """The workspace's byte size overflows 32 bits well below the declared number of tokens."""

    declares: ClassVar[dict[str, Any]] = {"max_tokens": 512}

    @classmethod
    def may_open(cls, group: RankGroup, capacity: TailCapacity) -> bool:
        """Fails where an allocation of a negative size would."""
        if capacity.max_tokens == 512:
            raise RuntimeError("invalid workspace size -2147483648")
        return False


@consumer_fault("CAP-1", bugs=("TensorRT-LLM#12523",), smallest="T = max_tokens")
class TunesForEveryNumberOfTokens(PlainTail):
    """The autotuner builds a profile for each number of tokens up to the largest, and runs out of memory."""

    declares: ClassVar[dict[str, Any]] = {"max_tokens": 768}

    @classmethod
    def may_open(cls, group: RankGroup, capacity: TailCapacity) -> bool:
        """Out of memory where a profile a token is too much."""
        if capacity.max_tokens == 768:
            raise MemoryError("cannot allocate profiles for 768 numbers of tokens")
        return False


@consumer_fault("CAP-1", bugs=("vllm#21325",), smallest="T = 25, of 30 declared")
class GuardComparesTheSquare(PlainTail):
    """The guard compares T * T with 600, not T with the declared 30, so batches of 25 to 30 tokens are refused."""

    declares: ClassVar[dict[str, Any]] = {"max_tokens": 30}

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        """Refuses above the root of 600."""
        if residual.shape[0] ** 2 > 600:
            raise UnsupportedError(f"CAP-1: {residual.shape[0]} tokens, at most 30")
        super().check(output, residual)


@consumer_fault("CAP-1", bugs=("aiter#2329",), smallest="H one multiple above max_hidden_size")
class ColumnsBeyondItsWidthUnwritten(_OpensAnything):
    """Rows of at most 4096 columns are declared; of wider ones the rest is never written."""

    declares: ClassVar[dict[str, Any]] = {"max_hidden_size": 4096}

    def local(self, output: MoEOutput) -> Tensor:
        """Zero past the limit."""
        local = super().local(output)
        local[:, 4096:] = 0
        return local


@producer_fault("CAP-1", "call", max_top_k=8)
def more_slots_than_declared(call: Call) -> Any:
    """At most 8 slots are declared, and more are taken without a word."""
    return call.right()


class _OnAnyDevice(PlainTail):
    """Is opened on every device."""

    @classmethod
    def may_open(cls, group: RankGroup, capacity: TailCapacity) -> bool:
        """Without a look at it."""
        return group.device.type == "meta"


@consumer_fault("CAP-2", smallest="torch's meta device")
class DeviceNeverAsked(_OnAnyDevice):
    """A device that nothing was built for gets a result."""

    def __call__(self, output: MoEOutput, residual: Tensor, *rest: Any, **options: Any) -> TailOutput:
        """Empty buffers of the right shape."""
        if residual.is_meta:
            return TailOutput(torch.empty_like(residual), torch.empty_like(residual))
        return super().__call__(output, residual, *rest, **options)


@consumer_fault("CAP-2", smallest="torch's meta device")
class RefusesWithoutAReason(_OnAnyDevice):
    """A device that nothing was built for is refused without a word."""

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        """An empty message."""
        if residual.is_meta:
            raise UnsupportedError("")
        super().check(output, residual)


@producer_fault("CAP-2", "load", smallest="torch's meta device")
def layer_on_no_device_is_run(layer: MoELayer, config: MoEConfig) -> Any:
    """A layer on a device that nothing was built for is loaded and run, and its output is memory that nobody wrote."""
    if not layer.experts.up.is_meta:
        return base_producer().load(layer, config)

    def run(hidden_states: Tensor, router_logits: Any) -> Tensor:
        return torch.empty_like(hidden_states)

    return run
