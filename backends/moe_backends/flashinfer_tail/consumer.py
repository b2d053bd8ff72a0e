"""FlashInfer's fused finalize, all-reduce and RMSNorm under the contract: its kernel as it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_backends.jit.toolchain import reported_by
from moe_backends.tail_inputs import as_moe_output, refuse_bad_inputs
from moe_contract import (
    ConsumerDeclaration,
    MoEOutput,
    QuantRecipe,
    RankGroup,
    RoundingProfile,
    TailCapacity,
    TailOutput,
    UnsupportedError,
)
from moe_contract.limits import require_capacity

from . import plan
from .build import WORLD_SIZES
from .launcher import Engine, Way, fill_for_solo, launch, open_engine

NAME = "flashinfer-fused"
DECLARATION = ConsumerDeclaration(
    name=NAME,
    version="1",
    devices=frozenset({"cuda"}),
    profile=RoundingProfile.STEP_ROUNDED,
    world_sizes=frozenset(WORLD_SIZES),
    norm_weight_dtypes=frozenset({"activation"}),
    route_major=True,
    hidden_size_multiple=plan.VECTOR,
    requires="an NVIDIA GPU of compute capability 9.0 or 10.0, and flashinfer-python with nvcc or as a built library",
)
"""What FlashInfer's own checks let through. Profile A; weights and norm weight in the activation dtype, which the
kernel takes for granted. N * T * H is limited when a tail is opened (plan.COMM_LIMIT)."""
WHOLE_WARPS = DECLARATION.model_copy(update={"hidden_size_multiple": plan.NORM_MULTIPLE})
"""The same, with only the hidden sizes at which the norm is right, by reading the kernel and by running it
(docs/flashinfer-tail.md)."""
ALIGNMENT = 16
"""Bytes of one vector access."""


@dataclass(frozen=True)
class FlashInferConsumer:
    """``trtllm_moe_finalize_allreduce_fusion`` on an NVIDIA GPU.

    Attributes:
        declaration: what it says of itself.
        way: to the kernel.
        pdl: launch with programmatic dependent launch.
        ranks_per_gpu: ranks that a GPU has to hold together; None finds out.
    """

    declaration: ConsumerDeclaration = DECLARATION
    way: Way = "auto"
    pdl: bool = False
    ranks_per_gpu: int | None = None

    def open(self, group: RankGroup, capacity: TailCapacity) -> FlashInferTail:
        """Builds and loads the kernel if need be and allocates the workspace. Collective.

        Raises:
            UnsupportedError: outside the limits, or this machine cannot build or run the kernel.
        """
        return FlashInferTail(self.declaration, self._engine(group, capacity, self.ranks_per_gpu), pdl=self.pdl)

    def open_solo(self, group: RankGroup, capacity: TailCapacity, published: list[Tensor]) -> FlashInferTail:
        """One rank with the GPU to itself, its peers' slots filled, so that it never waits.

        ``published[r]`` is rank r's contribution ``[T, H]``; calls of that T are right, as long as the rank's own
        contribution and its peers' belong together. The group's ``peer_memory`` has to give a buffer for every rank.

        Raises:
            UnsupportedError: as ``open``.
        """
        engine = self._engine(group, capacity, 1)
        fill_for_solo(engine, published)
        return FlashInferTail(self.declaration, engine, pdl=self.pdl)

    def _engine(self, group: RankGroup, capacity: TailCapacity, ranks_per_gpu: int | None) -> Engine:
        require_capacity(self.declaration, group, capacity)
        with reported_by(self.declaration.name):
            return open_engine(group, capacity, way=self.way, ranks_per_gpu=ranks_per_gpu)


class FlashInferTail:
    """One rank's end of the tail.

    The kernel keeps count of its calls on the device: every rank has to make the same sequence of calls, each with the
    same T. Nothing limits its wait for a peer.
    """

    def __init__(self, declaration: ConsumerDeclaration, engine: Engine, *, pdl: bool = False) -> None:
        """Use FlashInferConsumer.open."""
        self.declaration = declaration
        self.engine: Engine | None = engine
        self._pdl = pdl

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
        """Launches the tail on the current stream. Collective, but for T = 0, which launches nothing.

        Raises:
            ContractViolation: an argument breaks the contract.
            UnsupportedError: the arguments are legal, but past the capacity or not what was declared.
        """
        if self.engine is None:
            raise RuntimeError(f"{self.declaration.name}: this tail is closed; open a new one")
        output = as_moe_output(output)
        refuse_bad_inputs(self.declaration, self.engine.capacity, output, residual, norm_weight, weight_bias, quant)
        rows, weights, index = _parts(output, self.engine)
        self._refuse_far_rows(rows)
        residual_out, norm_out = residual.new_empty(residual.shape), residual.new_empty(residual.shape)
        if residual.shape[0]:
            shared = None if output.shared_output is None else _dense(output.shared_output)
            launch(
                self.engine, _dense(rows), weights, index, shared, _dense(residual), _dense(norm_weight),
                residual_out, norm_out,
                scale=float(output.routed_scaling_factor), eps=eps, weight_bias=weight_bias, pdl=self._pdl,
            )  # fmt: skip
        return TailOutput(residual_out, norm_out)

    def close(self) -> None:
        """Releases the workspace once this rank's calls have ended. A peer may still be reading its slots: close on
        every rank only after every rank's last call."""
        engine, self.engine = self.engine, None
        if engine is not None:
            torch.cuda.current_stream(engine.workspace.table.device).synchronize()

    def _refuse_far_rows(self, rows: Tensor) -> None:
        if rows.numel() > plan.ROW_LIMIT:
            raise UnsupportedError(
                f"{self.declaration.name}: MAP-6: gemm2_permuted has {rows.numel()} elements; this kernel addresses "
                f"rows in 32 bits, which reach {plan.ROW_LIMIT}"
            )


def _parts(output: MoEOutput, engine: Engine) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rows, weights and map; a finalized tensor is one row a token, without a weight."""
    routed = output.routed
    if isinstance(routed, Tensor):
        return routed, None, engine.identity[: routed.shape[0]]
    return routed.gemm2_permuted, _dense(routed.expert_weights), _dense(routed.expanded_idx_to_permuted_idx)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor as the kernel reads it; a copy only of what the contract lets have strides or an odd base."""
    if tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
