"""MAP: consumers that read a map wrongly: its layout, its absent slots, and offsets beyond 32 bits."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_conformance.faults import plain_tail
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail
from moe_contract import MoEOutput, UnfinalizedMoEOutput, UnsupportedError

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)


class _AnyMap(PlainTail):
    """Takes a map of any shape and dtype and reads it as [T, K]."""

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        """Makes the map fit, then checks the rest."""
        routed = output.routed
        if not isinstance(routed, Tensor) and not residual.is_meta:
            index = routed.expanded_idx_to_permuted_idx
            if index.numel() == routed.expert_weights.numel():
                routed.expanded_idx_to_permuted_idx = self.read(index, residual.shape[0])
        super().check(output, residual)

    def read(self, index: Tensor, tokens: int) -> Tensor:
        """The map as the kernel takes it."""
        return index


@consumer_fault("MAP-1", smallest="T=2 K=3")
class TakesAFlatMap(_AnyMap):
    """A flat or slot-major map is taken and read as token-major."""

    def read(self, index: Tensor, tokens: int) -> Tensor:
        """Reshaped."""
        return index if index.dtype is not torch.int32 else index.reshape(tokens, -1)


@consumer_fault("MAP-1", smallest="T=1 K=2")
class ReadsHalvesOfAWideMap(_AnyMap):
    """An int64 map is read as int32: every second entry is a high half."""

    def read(self, index: Tensor, tokens: int) -> Tensor:
        """The first half of the buffer."""
        if index.dtype is not torch.int64 or index.dim() != 2:
            return index
        return index.contiguous().view(torch.int32).reshape(-1)[: index.numel()].view(index.shape)


@consumer_fault("MAP-1", smallest="T=2 K=3")
class ReadsTheMapSlotMajor(PlainTail):
    """Entry k * T + t is read as slot k of token t."""

    def rows(self, routed: UnfinalizedMoEOutput, index: Tensor) -> Tensor:
        """Rows of the transposed map; a token of absent slots keeps its own."""
        turned = index.reshape(-1).view(index.shape[1], index.shape[0]).T
        return super().rows(routed, index if bool((index < 0).any()) else turned)


@consumer_fault("MAP-4", bugs=("vllm#46408",), smallest="one slot of -1")
class LastRowRead(PlainTail):
    """-1 indexes the last row, as Python does."""

    def terms(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Every slot is taken."""
        if not routed.gemm2_permuted.shape[0]:
            return super().terms(routed)
        index = routed.expanded_idx_to_permuted_idx.long()
        return routed.gemm2_permuted[index].float() * self.weights(routed).unsqueeze(-1)


@consumer_fault("MAP-4", smallest="one slot of -1 and NaN in row 0")
class RowZeroTimesZero(PlainTail):
    """-1 reads row 0 with weight 0: NaN there survives."""

    def terms(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Row times masked weight."""
        index = routed.expanded_idx_to_permuted_idx.long()
        weights = torch.where(index >= 0, self.weights(routed), 0.0)
        if not routed.gemm2_permuted.shape[0]:
            return super().terms(routed)
        return self.rows(routed, index) * weights.unsqueeze(-1)


@consumer_fault("MAP-4", smallest="one slot of -1 with a NaN weight")
class NanWeightTimesZero(PlainTail):
    """The row of a -1 slot is zeroed, but its weight multiplies it: NaN x 0."""

    def terms(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Masked row times weight."""
        index = routed.expanded_idx_to_permuted_idx.long()
        if not routed.gemm2_permuted.shape[0]:
            return super().terms(routed)
        rows = torch.where((index >= 0).unsqueeze(-1), self.rows(routed, index), 0.0)
        return rows * self.weights(routed).unsqueeze(-1)


@consumer_fault("MAP-4", bugs=("prime-rl#2035",), smallest="a token of only -1")
class TokenOfAbsentSlotsKeepsOldMemory(PlainTail):
    """A token whose slots are all -1 is skipped, and its part of the buffer stays as it was."""

    def top_k_sum(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """What was there before stands in."""
        total = super().top_k_sum(routed)
        gone = (routed.expanded_idx_to_permuted_idx < 0).all(1, keepdim=True)
        return torch.where(gone, 0.5, total)


class _Wraps(PlainTail):
    """A row's offset, in units of which an element is ``units_of_element``, is computed as a signed 32-bit integer."""

    def rows(self, routed: UnfinalizedMoEOutput, index: Tensor) -> Tensor:
        """A wrapped offset reads before the buffer: here, zeros."""
        offset = index * routed.gemm2_permuted.shape[1] * self.units_of_element(routed)
        return torch.where((offset >= 2**31).unsqueeze(-1), 0.0, super().rows(routed, index))

    def units_of_element(self, routed: UnfinalizedMoEOutput) -> int:
        """One: the offset counts elements."""
        return 1


@consumer_fault(
    "MAP-6",
    bugs=("flashinfer#2643", "TransformerEngine#2908", "sglang#35188", "sglang#4727", "vllm#45884", "DLBlas#171"),
    smallest="row * H >= 2^31",
)
class OffsetInInt32(_Wraps):
    """row * H is computed in 32 bits and wraps."""


@consumer_fault("MAP-6", smallest="row * H * 2 >= 2^31")
class ByteOffsetInInt32(_Wraps):
    """The offset in bytes is computed in 32 bits."""

    def units_of_element(self, routed: UnfinalizedMoEOutput) -> int:
        """Two for 16-bit rows."""
        return routed.gemm2_permuted.element_size()


@consumer_fault("MAP-6", smallest="row 299,594 at H 7168")
class RefusesLargeBuffers(PlainTail):
    """A buffer of 2^31 elements or more is refused, though no limit on P is declared."""

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        """Refuses."""
        if not isinstance(output.routed, Tensor) and output.routed.gemm2_permuted.numel() >= 2**31:
            raise UnsupportedError("CAP-1: at most 2^31 - 1 elements of rows")
        super().check(output, residual)
