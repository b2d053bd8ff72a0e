"""WGT: routing weights in another order, of another dtype, of other bytes, applied another number of times."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.faults import delta_producer, plain_tail
from moe_conformance.faults.delta_producer import Call
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail
from moe_contract import MoEOutput, RoutingMethod, UnfinalizedMoEOutput

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)
producer_fault = partial(delta_producer.producer_fault, into=FAULTS)
Output = UnfinalizedMoEOutput
FLOAT32 = frozenset({"float32"})


def _other_half(dtype: torch.dtype) -> torch.dtype:
    return torch.float16 if dtype == torch.bfloat16 else torch.bfloat16


@producer_fault("WGT-1", smallest="K=2")
def weights_in_reverse_slot_order(output: Output, call: Call) -> Output:
    """Each token's weights stand in the reverse of the map's order."""
    return replace(output, expert_weights=output.expert_weights.flip(1))


@producer_fault("WGT-1", smallest="K=2")
def weights_sorted_without_the_map(output: Output, call: Call) -> Output:
    """Weights are sorted upwards, the map is not."""
    return replace(output, expert_weights=output.expert_weights.sort(1).values)


@producer_fault("WGT-1", smallest="T=2 K=2")
def weights_of_the_token_before(output: Output, call: Call) -> Output:
    """The weights are one token further than the map."""
    return replace(output, expert_weights=output.expert_weights.roll(1, 0))


@producer_fault("WGT-1", smallest="T=2 K=3")
def weights_are_a_transposed_view(output: Output, call: Call) -> Output:
    """Weights are a [K, T] buffer's transpose."""
    return replace(output, expert_weights=output.expert_weights.T.contiguous().T)


@producer_fault("WGT-2", bugs=("flashinfer#4614",))
def weights_keep_the_callers_dtype(output: Output, call: Call) -> Output:
    """Weights are float32 where the activation dtype is declared."""
    return replace(output, expert_weights=output.expert_weights.float())


@producer_fault("WGT-2", weights_dtypes=FLOAT32)
def float32_weights_declared_only(output: Output, call: Call) -> Output:
    """Float32 weights are declared, 16-bit ones handed over."""
    return output


@consumer_fault("WGT-2", smallest="T=1 K=1")
class Float32WeightsReadInHalves(PlainTail):
    """Float32 weights are taken undeclared, and their bytes read as the activation dtype."""

    declares: ClassVar[dict[str, Any]] = {"weights_dtypes": frozenset({"activation"})}

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        """Relabels them."""
        routed = output.routed
        if not isinstance(routed, Tensor) and routed.expert_weights.dtype == torch.float32:
            shape = routed.expert_weights.shape
            halves = routed.expert_weights.contiguous().view(residual.dtype).reshape(-1)
            routed.expert_weights = halves[: shape.numel()].reshape(shape)
        super().check(output, residual)


@consumer_fault("WGT-2", smallest="T=1 K=1")
class TheOther16BitsTaken(PlainTail):
    """Weights of the other 16-bit type are read as if they were of the activation dtype."""

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        """Relabels them."""
        routed = output.routed
        if not isinstance(routed, Tensor) and routed.expert_weights.dtype == _other_half(residual.dtype):
            routed.expert_weights = routed.expert_weights.contiguous().view(residual.dtype)
        super().check(output, residual)


@consumer_fault("WGT-2", smallest="T=1 K=1, a weight with more than 8 bits")
class Float32WeightsRounded(PlainTail):
    """Declared float32 weights are rounded to the activation dtype before use."""

    def weights(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Rounded."""
        return routed.expert_weights.to(routed.gemm2_permuted.dtype).float()


@producer_fault(
    "WGT-3", bugs=("flashinfer#3595",), weights_dtypes=FLOAT32, base="reference-fp32-weights", smallest="T=1 K=1"
)
def bfloat16_in_a_buffer_labelled_float32(output: Output, call: Call) -> Output:
    """The kernel writes 16-bit weights through a pointer to a float32 buffer, half of which stays zero."""
    buffer = torch.zeros(output.expert_weights.shape)
    narrow = output.expert_weights.to(output.gemm2_permuted.dtype)
    buffer.view(narrow.dtype).view(-1)[: narrow.numel()] = narrow.flatten()
    return replace(output, expert_weights=buffer)


@producer_fault("WGT-3", bugs=("flashinfer#3925",))
def weights_of_the_other_16_bit_type(output: Output, call: Call) -> Output:
    """The bytes are float16 where the tag says bfloat16, or the reverse."""
    weights = output.expert_weights
    return replace(output, expert_weights=weights.to(_other_half(weights.dtype)).view(weights.dtype))


@producer_fault("WGT-3", bugs=("flashinfer#4614",))
def precomputed_weights_never_written(output: Output, call: Call) -> Output:
    """With a router outside the kernel the weights that are returned were never written."""
    if call.layer.routing.method is not RoutingMethod.PRECOMPUTED:
        return output
    return replace(output, expert_weights=torch.zeros_like(output.expert_weights))


@producer_fault("WGT-3", smallest="a method that renormalises")
def weights_not_renormalised(output: Output, call: Call) -> Output:
    """Renormalising methods hand over weights whose sum is not 1."""
    if call.layer.routing.method is not RoutingMethod.RENORMALIZE_NAIVE:
        return output
    return replace(output, expert_weights=output.expert_weights * 0.875)


@consumer_fault("WGT-4", bugs=("sglang#6274",), smallest="K=1, weight 0.5")
class WeightNotApplied(PlainTail):
    """Rows are summed without their weights."""

    def weights(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Ones."""
        return torch.ones_like(routed.expert_weights, dtype=torch.float32)


@consumer_fault("WGT-4", bugs=("vllm#43694",), smallest="K=1, weight 0.5")
class WeightAppliedTwice(PlainTail):
    """Rows are weighted on load and again in the sum."""

    def weights(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Squared."""
        return routed.expert_weights.float().square()


@consumer_fault("WGT-4", smallest="K=1, weight 0.5")
class SingleExpertTakenAsWeighted(PlainTail):
    """With K = 1 the row is taken to carry its weight already."""

    def weights(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Ones for top-1."""
        weights = super().weights(routed)
        return torch.ones_like(weights) if weights.shape[1] == 1 else weights
