"""SCALE: the routed scaling factor left out, applied twice, or applied to something else."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moe_conformance.faults import delta_producer, plain_tail, wiring
from moe_conformance.faults.bases import base_producer
from moe_conformance.faults.delta_producer import Call
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail
from moe_contract import MoEOutput, RoutingMethod, UnfinalizedMoEOutput
from moe_contract.declarations import FOLDING_METHODS
from moe_contract.forward import MoEForward

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)
producer_fault = partial(delta_producer.producer_fault, into=FAULTS)
engine_fault = partial(wiring.engine_fault, into=FAULTS)
Output = UnfinalizedMoEOutput


@consumer_fault(
    "SCALE-1", bugs=("sglang#8333", "vllm#32437", "vllm-plugin-FL#251"), smallest="T=1 K=1 weight 1, factor 2.5"
)
class ScaleForgotten(PlainTail):
    """The factor is not applied."""

    def scale(self, routed: Tensor, factor: float) -> Tensor:
        """Nothing."""
        return routed


@consumer_fault("SCALE-1", bugs=("vllm#24119", "vllm#45037", "sglang#35152"), smallest="T=1 K=1 weight 1, factor 2.5")
class ScaleTwice(PlainTail):
    """The factor is applied to the weights and to the sum."""

    def scale(self, routed: Tensor, factor: float) -> Tensor:
        """Squared."""
        return routed * factor * factor


@consumer_fault("SCALE-1", bugs=("kvcache-ai/sglang#86",), smallest="two ranks")
class ScaleTwiceOnOneRank(PlainTail):
    """Rank 0 scales its experts in the kernel and once more after it."""

    def scale(self, routed: Tensor, factor: float) -> Tensor:
        """Squared on rank 0."""
        return routed * (factor * factor if self.group.rank == 0 else factor)


@consumer_fault("SCALE-1", bugs=("sglang#12998",), smallest="a finalized tensor")
class ScaleForgottenForFinalized(PlainTail):
    """The path of a finalized tensor does not know the factor."""

    def local(self, output: MoEOutput) -> Tensor:
        """Without the factor where the routed part is a tensor."""
        return super().local(
            replace(output, routed_scaling_factor=1.0) if isinstance(output.routed, Tensor) else output
        )


class _FoldedAndStated(MoEForward):
    """The factor is stated to the finalizer although the producer folds it."""

    def _remaining_scale(self, router_logits: object) -> float:
        return self.layer.routing.routed_scaling_factor


engine_fault("SCALE-1", wiring.FORWARD, bugs=("vllm#24119", "vllm#45037"), producer=base_producer("reference-folded"),
             smallest="deepseek-v3, factor 2.5")(_FoldedAndStated)  # fmt: skip


@engine_fault("SCALE-1", wiring.FORWARD, bugs=("vllm#32437", "vllm-plugin-FL#251"), smallest="factor 2.5")
class FactorLostByTheEngine(MoEForward):
    """The engine never hands the factor on, although nothing folded it."""

    def _remaining_scale(self, router_logits: object) -> float:
        return 1.0


@consumer_fault("SCALE-2", smallest="a residual that is not 0")
class EverythingScaled(PlainTail):
    """The factor multiplies the sum of everything, the residual included."""

    def scale(self, routed: Tensor, factor: float) -> Tensor:
        """Later."""
        self.kept["factor"] = factor
        return routed

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """Now, over all of it."""
        factor: float = self.kept["factor"]
        return ((total + residual.float()) * factor).to(residual.dtype)


@consumer_fault("SCALE-2", smallest="a finalized tensor with a shared output")
class EverythingScaledForFinalized(EverythingScaled):
    """With a finalized tensor the factor multiplies the sum of everything."""

    def local(self, output: MoEOutput) -> Tensor:
        """The usual order for the unfinalized form."""
        if isinstance(output.routed, Tensor):
            return super().local(output)
        self.kept["factor"] = 1.0
        return PlainTail.local(self, output) if output.routed_scaling_factor == 1.0 else self._usual(output)

    def _usual(self, output: MoEOutput) -> Tensor:
        scaled = self.routed(output) * output.routed_scaling_factor
        return scaled if output.shared_output is None else self.add_shared(scaled, output)


@producer_fault("SCALE-3")
def scale_folded_undeclared(output: Output, call: Call) -> Output:
    """The weights contain the factor, the declaration says that they do not."""
    return replace(output, expert_weights=output.expert_weights * call.layer.routing.routed_scaling_factor)


@producer_fault("SCALE-3", folds_scale=FOLDING_METHODS)
def folding_declared_only(output: Output, call: Call) -> Output:
    """The declaration says that two methods fold the factor, and neither does."""
    return output


@producer_fault("SCALE-3", smallest="one method")
def one_method_folds(output: Output, call: Call) -> Output:
    """MiniMax routing folds the factor undeclared, no other method does."""
    routing = call.layer.routing
    factor = routing.routed_scaling_factor if routing.method is RoutingMethod.MINIMAX2 else 1.0
    return replace(output, expert_weights=output.expert_weights * factor)


@producer_fault("SCALE-3", bugs=("sglang#34456",), smallest="precomputed ids, factor 2.5")
def precomputed_routing_folds(output: Output, call: Call) -> Output:
    """Weights of a router outside the kernel are multiplied by the factor."""
    routing = call.layer.routing
    factor = routing.routed_scaling_factor if routing.method is RoutingMethod.PRECOMPUTED else 1.0
    scaled = (output.expert_weights.float() * factor).to(output.expert_weights.dtype)
    return replace(output, expert_weights=torch.as_tensor(scaled))


@producer_fault("SCALE-3", "finalized", smallest="renormalize, factor 2.5, flag off")
def finalized_sum_scaled_undeclared(output: Tensor, call: Call) -> Tensor:
    """The kernel's own finalize applies the factor, which the finalizer then applies again."""
    routing = call.layer.routing
    return output * (routing.routed_scaling_factor if routing.method is RoutingMethod.RENORMALIZE else 1.0)
