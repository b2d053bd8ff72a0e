"""OUT: forms that are none, empty batches, gradients, written inputs and reused buffers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_conformance.faults import delta_producer, plain_tail
from moe_conformance.faults.bases import base_producer
from moe_conformance.faults.delta_producer import Call
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail
from moe_contract import MoEConfig, MoEOutput, RoutingMethod, UnfinalizedMoEOutput, UnsupportedError

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)
producer_fault = partial(delta_producer.producer_fault, into=FAULTS)
Output = UnfinalizedMoEOutput


@producer_fault("OUT-1")
def kernel_list_handed_on(output: Output, call: Call) -> list[Tensor]:
    """The kernel's own list of three tensors is returned as it is."""
    return [output.gemm2_permuted, output.expert_weights, output.expanded_idx_to_permuted_idx]


@producer_fault("OUT-1", "finalized")
def finalized_output_flat(output: Tensor, call: Call) -> Tensor:
    """A finalized output is a flat view."""
    return output.reshape(-1) if len(output) else output


@producer_fault("OUT-1", "finalized")
def finalized_output_in_float32(output: Tensor, call: Call) -> Tensor:
    """A finalized output is not rounded to the activation dtype."""
    return output.float() if len(output) else output


@producer_fault("OUT-1", "call", can_defer=False)
def finalizes_zeros(call: Call) -> Tensor:
    """A producer that cannot defer returns a buffer that it never wrote."""
    return torch.zeros_like(call.hidden_states)


@producer_fault("OUT-1", "finalized", smallest="one rank")
def finalizes_zeros_on_one_rank(output: Tensor, call: Call) -> Tensor:
    """Without a reduction to fuse with, the output was never written."""
    return torch.zeros_like(output) if call.config.tp_size == 1 else output


@producer_fault("OUT-1", "call", smallest="llama4, T=1")
def weighted_input_weighted_at_the_output(call: Call) -> Any:
    """Routing that weights the expert's input weights its output instead."""
    if call.layer.routing.method is not RoutingMethod.LLAMA4:
        return call.right()
    other = replace(call.layer, routing=replace(call.layer.routing, method=RoutingMethod.SIGMOID))
    return base_producer("reference").load(other, MoEConfig())(call.hidden_states, call.router_logits)


@producer_fault("OUT-2", "call", bugs=("tokenspeed#415",), smallest="T=0")
def triple_of_no_tokens(call: Call) -> Any:
    """An empty batch gives an unfinalized output."""
    if len(call.hidden_states) or not call.config.use_deferred_moe_finalize:
        return call.right()
    top_k = call.layer.routing.top_k
    empty = call.hidden_states
    return UnfinalizedMoEOutput(empty, empty.new_zeros(0, top_k), torch.zeros(0, top_k, dtype=torch.int32))


@producer_fault("OUT-2", "call", bugs=("vllm#51106",), smallest="T=0")
def empty_batch_reshaped(call: Call) -> Any:
    """Hidden states are reshaped to [T, -1], which has no answer for T = 0."""
    call.hidden_states.reshape(len(call.hidden_states), -1)
    return call.right()


@producer_fault("OUT-2", "call", bugs=("sglang#38773", "DeepEP#374"), smallest="T=0")
def null_pointer_refused(call: Call) -> Any:
    """A batch without data is taken for a missing one."""
    if call.hidden_states.numel() and call.hidden_states.data_ptr():
        return call.right()
    if len(call.hidden_states):
        return call.right()
    raise ValueError("hidden_states has a null data pointer")


@producer_fault("OUT-2", "finalized", smallest="T=0")
def empty_output_without_columns(output: Tensor, call: Call) -> Tensor:
    """An empty batch gives a tensor of shape [0]."""
    return output if len(output) else output.new_empty(0)


@consumer_fault("OUT-2", bugs=("tokenspeed#415",), smallest="T=0")
class DividesByTheNumberOfTokens(PlainTail):
    """The grid is computed as a number of threads divided by T."""

    def local(self, output: MoEOutput) -> Tensor:
        """A division first."""
        local = super().local(output)
        self.kept["grid"] = 1024 // local.shape[0]
        return local


@consumer_fault("OUT-2", bugs=("sglang#22455",), smallest="T=0")
class NoTokensAreNoPowerOfTwo(PlainTail):
    """T = 0 falls through a test for powers of two and is refused."""

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        """Refuses it."""
        if residual.shape[0] == 0:
            raise UnsupportedError("CAP-1: the number of tokens must be a power of two or above 64")
        super().check(output, residual)


@producer_fault("OUT-3")
def rows_require_grad(output: Output, call: Call) -> Output:
    """Rows are part of an autograd graph."""
    return replace(output, gemm2_permuted=output.gemm2_permuted.detach().requires_grad_())


@producer_fault("OUT-3", "any")
def gradients_recorded_where_the_caller_records(output: Any, call: Call) -> Any:
    """A caller that records gradients gets an output that requires them."""
    if not torch.is_grad_enabled():
        return output
    if isinstance(output, Tensor):
        return output.detach().requires_grad_()
    return replace(output, expert_weights=output.expert_weights.detach().requires_grad_())


@producer_fault("OUT-4", "any")
def hidden_states_overwritten(output: Any, call: Call) -> Any:
    """The hidden states are used as scratch memory."""
    call.hidden_states.data.mul_(2)
    return output


@producer_fault("OUT-4", "any", smallest="the last token's logits")
def logits_masked_in_place(output: Any, call: Call) -> Any:
    """The router marks what it has selected in the logits that it was given."""
    if isinstance(call.router_logits, Tensor):
        call.router_logits.data[-1:, :1] = -1e30
    return output


@producer_fault("OUT-4", "any", smallest="precomputed routing")
def precomputed_weights_normalised_in_place(output: Any, call: Call) -> Any:
    """Weights of a router outside are normalised where they lie."""
    if not isinstance(call.router_logits, Tensor):
        call.router_logits.weights.data.mul_(0.5)
    return output


@consumer_fault("OUT-4", smallest="T=1")
class ResidualOverwritten(PlainTail):
    """The residual that was handed over is the output buffer, undeclared."""

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """In place."""
        return residual.copy_(total + residual.float())


@consumer_fault("OUT-4", bugs=("sglang#39286",), smallest="T=1, shared output")
class SharedOutputOverwritten(PlainTail):
    """The local sum is built in the shared output's memory, which a capture still holds."""

    def add_shared(self, scaled: Tensor, output: MoEOutput) -> Tensor:
        """In place."""
        total = super().add_shared(scaled, output)
        assert output.shared_output is not None
        output.shared_output.copy_(total)
        return total


@consumer_fault("OUT-4", smallest="T=1, one slot of -1")
class AbsentWeightsZeroedInPlace(PlainTail):
    """Weights of absent slots are set to 0 in the producer's buffer."""

    def weights(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Zeroed where absent."""
        routed.expert_weights[routed.expanded_idx_to_permuted_idx < 0] = 0
        return super().weights(routed)


def _buffered(name: str, output: Output, call: Call) -> Output:
    tensor = getattr(output, name)
    buffer = call.kept.setdefault(tensor.shape, torch.empty_like(tensor))
    return replace(output, **{name: buffer.copy_(tensor)})


@producer_fault("OUT-5", smallest="two calls")
def rows_in_a_reused_workspace(output: Output, call: Call) -> Output:
    """Rows lie in a workspace that the next call writes."""
    return _buffered("gemm2_permuted", output, call)


@producer_fault("OUT-5", "call", smallest="two calls")
def weights_cleared_by_the_next_call(call: Call) -> Any:
    """A call clears the weights buffer that the call before handed out."""
    before = call.kept.get("weights")
    if before is not None:
        before.zero_()
    output = call.right()
    if not isinstance(output, Tensor):
        call.kept["weights"] = output.expert_weights
    return output
