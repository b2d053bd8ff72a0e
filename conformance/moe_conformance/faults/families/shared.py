"""SHARED: the shared expert's output, counted another number of times or multiplied by something."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from moe_conformance.faults import plain_tail, wiring
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail
from moe_contract import MoEOutput
from moe_contract.forward import MoEForward

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)
engine_fault = partial(wiring.engine_fault, into=FAULTS)


def _shared(output: MoEOutput) -> Tensor:
    assert output.shared_output is not None
    return output.shared_output.float()


@consumer_fault("SHARED-1", smallest="T=1, routed 0, shared 1")
class SharedTwice(PlainTail):
    """The shared output is added before the reduction and again after it."""

    def add_shared(self, scaled: Tensor, output: MoEOutput) -> Tensor:
        """Twice."""
        return scaled + 2.0 * _shared(output)


@consumer_fault("SHARED-1", smallest="T=1, routed 0, shared 1")
class SharedLeftOut(PlainTail):
    """The shared output is not added."""

    def add_shared(self, scaled: Tensor, output: MoEOutput) -> Tensor:
        """Nothing."""
        return scaled


@consumer_fault("SHARED-1", bugs=("sglang#31475",), smallest="two ranks, routed 0, shared 1")
class SharedOnceARank(PlainTail):
    """The shared output is taken for replicated, and every rank adds all ranks' parts."""

    def add_shared(self, scaled: Tensor, output: MoEOutput) -> Tensor:
        """N times."""
        return scaled + self.group.size * _shared(output)


@consumer_fault("SHARED-1", smallest="two ranks")
class SharedOfRankZeroAlone(PlainTail):
    """Only rank 0 adds its part, as if the shared output were replicated."""

    def add_shared(self, scaled: Tensor, output: MoEOutput) -> Tensor:
        """On rank 0."""
        return scaled + _shared(output) if self.group.rank == 0 else scaled


@engine_fault(
    "SHARED-1", wiring.FORWARD, bugs=("vllm#49378", "tpu-inference#3151"), smallest="two ranks, routed 0, shared 1"
)
class SharedReducedByTheEngine(MoEForward):
    """The shared expert's output is reduced before it is handed over."""

    def __call__(self, hidden_states: Tensor, router_logits: Any) -> MoEOutput | Tensor:
        """The layer's output, with another shared part."""
        output = super().__call__(hidden_states, router_logits)
        if isinstance(output, MoEOutput) and output.shared_output is not None and self.group is not None:
            output.shared_output = self.group.all_reduce(output.shared_output)
        return output


@engine_fault("SHARED-1", wiring.FORWARD, bugs=("sglang#31475",), smallest="two ranks")
class SharedPartOfRankZeroEverywhere(MoEForward):
    """Every rank hands over rank 0's shared output, as a replicated expert gives it."""

    def __call__(self, hidden_states: Tensor, router_logits: Any) -> MoEOutput | Tensor:
        """The layer's output, with another shared part."""
        output = super().__call__(hidden_states, router_logits)
        if isinstance(output, MoEOutput) and output.shared_output is not None and self.group is not None:
            output.shared_output = self.group.all_gather(output.shared_output)[0]
        return output


@consumer_fault("SHARED-2", smallest="T=1, routed 0, shared 1, factor 2.5")
class SharedScaled(PlainTail):
    """The factor multiplies the sum after the shared output was added."""

    def local(self, output: MoEOutput) -> Tensor:
        """Scaled last."""
        routed = self.routed(output)
        if output.shared_output is not None:
            routed = routed + _shared(output)
        return routed * output.routed_scaling_factor


@consumer_fault("SHARED-2", smallest="T=1 K=1, weight 0.5, shared 1")
class SharedWeighted(PlainTail):
    """The shared expert is an extra slot, with the sum of the others' weights as its own."""

    def add_shared(self, scaled: Tensor, output: MoEOutput) -> Tensor:
        """Weighted where there are weights."""
        if isinstance(output.routed, Tensor):
            return super().add_shared(scaled, output)
        return scaled + _shared(output) * self.weights(output.routed).sum(1, keepdim=True)
