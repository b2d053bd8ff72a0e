"""What a tail of FlashInfer's kernel launches, and what it refuses to."""

from __future__ import annotations

import pytest
import torch

from moe_backends.flashinfer_tail import DECLARATION, Engine, FlashInferTail, plan
from moe_backends.flashinfer_tail import workspace as memory
from moe_backends.flashinfer_tail.kernel import Call
from moe_backends.flashinfer_tail.plan import Shape
from moe_contract import ContractViolation, MoEOutput, TailCapacity, UnfinalizedMoEOutput, UnsupportedError

BF16, CPU = torch.bfloat16, torch.device("cpu")


class RecordingKernel:
    """Notes its calls; what a tail would launch."""

    way = "header"
    max_cluster = plan.MAX_CLUSTER

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def resident(self, shape: Shape) -> int:
        """Room for anything."""
        return 10**6

    def run(self, call: Call) -> None:
        """Keeps the call."""
        self.calls.append(call)


def opened(kernel: RecordingKernel) -> FlashInferTail:
    """A tail of 2 ranks on the CPU, for what it decides before it launches."""
    asked = TailCapacity(4, 16, 2, BF16)
    identity = torch.arange(4, dtype=torch.int32)[:, None]
    return FlashInferTail(DECLARATION, Engine(kernel, memory.alone(2, plan.comm_bytes(asked, 2), CPU), asked, identity))


def output(tokens: int, weights_dtype: torch.dtype = BF16, rows: int = 6) -> MoEOutput:
    """A legal output of H 16 and K 2."""
    index = torch.arange(tokens * 2, dtype=torch.int32).view(tokens, 2)
    weights = torch.ones(tokens, 2, dtype=weights_dtype)
    return MoEOutput(UnfinalizedMoEOutput(torch.ones(rows, 16, dtype=BF16), weights, index), None, 1.0)


def test_no_tokens_no_launch() -> None:
    """OUT-2: an empty call has empty results and does not count as a call of the kernel."""
    kernel = RecordingKernel()
    empty = torch.ones(0, 16, dtype=BF16)
    found = opened(kernel)(MoEOutput(empty, None, 2.5), empty, torch.ones(16, dtype=BF16), eps=1e-6)
    assert kernel.calls == []
    assert found.residual_out.shape == found.norm_out.shape == (0, 16)


def test_a_call_reaches_the_kernel_as_it_is() -> None:
    """Tensors without copies, the scale, the form of the norm; the outputs are what the kernel was given to write."""
    kernel = RecordingKernel()
    given, residual, gamma = output(2), torch.ones(2, 16, dtype=BF16), torch.ones(16, dtype=BF16)
    given = MoEOutput(given.routed, residual.clone(), 2.5)
    found = opened(kernel)(given, residual, gamma, eps=1e-5, weight_bias=1.0)
    (call,) = kernel.calls
    triple = given.routed
    assert isinstance(triple, UnfinalizedMoEOutput)
    assert call.rows is triple.gemm2_permuted and call.weights is triple.expert_weights
    assert call.index is triple.expanded_idx_to_permuted_idx
    assert call.shared is given.shared_output and call.residual is residual and call.norm_weight is gamma
    assert call.residual_out is found.residual_out and call.norm_out is found.norm_out
    assert (call.rank, call.ranks, call.scale, call.eps, call.weight_bias, call.pdl) == (0, 2, 2.5, 1e-5, 1.0, False)


def test_a_finalized_tensor_is_one_unweighted_row_a_token() -> None:
    """The identity as the map and no weights: the kernel then starts from the tensor's own values."""
    kernel = RecordingKernel()
    routed, residual = torch.full((3, 16), 2.0, dtype=BF16), torch.ones(3, 16, dtype=BF16)
    opened(kernel)(MoEOutput(routed, None, 1.0), residual, torch.ones(16, dtype=BF16), eps=1e-6)
    assert kernel.calls[0].rows is routed and kernel.calls[0].weights is None
    assert kernel.calls[0].index.tolist() == [[0], [1], [2]] and kernel.calls[0].index.is_contiguous()


def test_what_the_kernel_would_misread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 weights or norm weight, a flat map, rows past 32 bits: never launched."""
    kernel = RecordingKernel()
    tail, residual, gamma = opened(kernel), torch.ones(2, 16, dtype=BF16), torch.ones(16, dtype=BF16)
    with pytest.raises(UnsupportedError, match="WGT-2"):
        tail(output(2, torch.float32), residual, gamma, eps=1e-6)
    with pytest.raises(UnsupportedError, match="NORM-1"):
        tail(output(2), residual, gamma.float(), eps=1e-6)
    flat = output(2)
    flat.routed.expanded_idx_to_permuted_idx = torch.arange(4, dtype=torch.int32)  # type: ignore[union-attr]
    with pytest.raises(ContractViolation, match="MAP-1"):
        tail(flat, residual, gamma, eps=1e-6)
    monkeypatch.setattr(plan, "ROW_LIMIT", 6 * 16 - 1)
    with pytest.raises(UnsupportedError, match="MAP-6: gemm2_permuted has 96 elements"):
        tail(output(2), residual, gamma, eps=1e-6)
    assert kernel.calls == []


def test_a_closed_tail_says_so() -> None:
    """A call after close is an error of its own."""
    tail = opened(RecordingKernel())
    tail.engine = None
    with pytest.raises(RuntimeError, match="this tail is closed"):
        tail(output(1), torch.ones(1, 16, dtype=BF16), torch.ones(16, dtype=BF16), eps=1e-6)
