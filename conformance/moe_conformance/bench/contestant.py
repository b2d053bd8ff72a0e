"""One consumer made ready for one point: its opened tails, and a step of all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_conformance.bench.model import Mode, Point
from moe_conformance.cases.tail_data import TailInputs
from moe_conformance.harness.solo import SoloGroup
from moe_conformance.harness.threads import run_ranks
from moe_contract import Consumer, SoloConsumer, Tail, TailCapacity, TailOutput, UnsupportedError, finalize
from moe_contract.dtypes import torch_dtype


@dataclass
class Contestant:
    """``tails`` in rank order, one alone in solo mode, each with its own stream."""

    consumer: Consumer
    tails: list[Tail]
    streams: list[torch.cuda.Stream]

    def step(self, inputs: TailInputs) -> list[TailOutput]:
        """One call on every rank, each on its stream; returns at once."""
        found = []
        for rank, (tail, stream) in enumerate(zip(self.tails, self.streams, strict=True)):
            with torch.cuda.stream(stream):
                found.append(tail(inputs.outputs[rank], inputs.residual, inputs.norm_weight, eps=inputs.eps))
        return found

    def fork(self) -> None:
        """Every rank's stream waits for the current one."""
        current = torch.cuda.current_stream()
        for stream in self.streams:
            stream.wait_stream(current)

    def join(self) -> None:
        """The current stream waits for every rank's."""
        current = torch.cuda.current_stream()
        for stream in self.streams:
            current.wait_stream(stream)

    def close(self) -> None:
        """Closes every tail."""
        torch.cuda.synchronize()
        for tail in self.tails:
            tail.close()


def open_contestant(consumer: Consumer, point: Point, first: TailInputs, device: torch.device) -> Contestant:
    """Opens the tails that the point's mode needs. ``first``: the inputs that a solo tail's peers sent.

    Raises:
        UnsupportedError: the consumer cannot run at this point.
    """
    capacity = TailCapacity(point.tokens, point.hidden_size, point.top_k, torch_dtype(point.dtype))
    if point.mode is Mode.SOLO:
        tails = [_solo(consumer, point, first, capacity, device)]
    else:
        if not consumer.declaration.graph_capturable:
            raise UnsupportedError(f"{consumer.declaration.name} declares that its calls cannot be captured in a graph")
        tails = run_ranks(lambda group: consumer.open(group, capacity), point.ranks, device=device)
    return Contestant(consumer, tails, [torch.cuda.Stream(device) for _ in tails])


def _solo(consumer: Consumer, point: Point, first: TailInputs, capacity: TailCapacity, device: torch.device) -> Tail:
    if not isinstance(consumer, SoloConsumer):
        raise UnsupportedError(f"{consumer.declaration.name} has no open_solo")
    published = [
        finalize(output.routed, routed_scaling_factor=output.routed_scaling_factor, shared_output=output.shared_output)
        for output in first.outputs
    ]
    return consumer.open_solo(SoloGroup(point.ranks, device), capacity, published)
