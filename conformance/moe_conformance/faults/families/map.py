"""MAP: wrong maps, and maps that are read wrongly."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moe_conformance.faults import delta_producer, plain_tail
from moe_conformance.faults.delta_producer import Call
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail
from moe_contract import MoELayer, MoEOutput, UnfinalizedMoEOutput, UnsupportedError

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)
producer_fault = partial(delta_producer.producer_fault, into=FAULTS)
Output = UnfinalizedMoEOutput


def _with_map(output: Output, index: Tensor) -> Output:
    return replace(output, expanded_idx_to_permuted_idx=index)


@producer_fault("MAP-1", bugs=("flashinfer#3931",), smallest="T=2 K=3")
def slot_major_map(output: Output, call: Call) -> Output:
    """The map is [K, T]."""
    return _with_map(output, output.expanded_idx_to_permuted_idx.T.contiguous())


@producer_fault("MAP-1")
def flat_map(output: Output, call: Call) -> Output:
    """The map is the kernel's own flat [T * K]."""
    return _with_map(output, output.expanded_idx_to_permuted_idx.reshape(-1))


@producer_fault("MAP-1")
def map_in_64_bits(output: Output, call: Call) -> Output:
    """The map is int64."""
    return _with_map(output, output.expanded_idx_to_permuted_idx.long())


@producer_fault("MAP-1", base="reference-route-major", smallest="T=1 K=2")
def route_major_rows_out_of_order(output: Output, call: Call) -> Output:
    """Rows said to be route-major have their first two routes in each other's place."""
    order = torch.arange(output.gemm2_permuted.shape[0])
    order[:2] = order[:2].flip(0)
    index = output.expanded_idx_to_permuted_idx
    moved = torch.where(index >= 0, order[index.clamp(min=0).long()].to(torch.int32), -1)
    return _with_map(replace(output, gemm2_permuted=output.gemm2_permuted[order]), moved.to(torch.int32))


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


@producer_fault("MAP-2", bugs=("vllm#57946",))
def absent_marked_by_the_least_integer(output: Output, call: Call) -> Output:
    """Slots whose expert is elsewhere, and the last slot, hold -2^31."""
    index = output.expanded_idx_to_permuted_idx
    absent = index < 0
    absent.view(-1)[-1:] = True
    return _with_map(output, index.masked_fill(absent, -(2**31)))


@producer_fault("MAP-2", bugs=("vllm#42034",))
def entry_one_past_the_end(output: Output, call: Call) -> Output:
    """The last slot's entry is P."""
    index = output.expanded_idx_to_permuted_idx.clone()
    index.view(-1)[-1:] = output.gemm2_permuted.shape[0]
    return _with_map(output, index)


@producer_fault("MAP-2", bugs=("sglang#24850",), smallest="an expert-parallel rank with one absent slot")
def garbage_in_absent_slots(output: Output, call: Call) -> Output:
    """Entries of absent slots were never written."""
    index = output.expanded_idx_to_permuted_idx
    garbage = torch.arange(index.numel(), dtype=torch.int32).view(index.shape) * 7919 + 2**20
    return _with_map(output, torch.where(index < 0, garbage, index))


@producer_fault("MAP-3")
def two_routes_one_row(output: Output, call: Call) -> Output:
    """The second route gets the first one's row."""
    index = output.expanded_idx_to_permuted_idx.clone()
    valid = (index.view(-1) >= 0).nonzero().reshape(-1)
    if valid.numel() > 1:
        index.view(-1)[valid[1]] = index.view(-1)[valid[0]]
    return _with_map(output, index)


@producer_fault("MAP-3", smallest="two tokens of one expert")
def counter_of_an_expert_races(output: Output, call: Call) -> Output:
    """Two tokens that chose the same expert in their first slot are handed the same row."""
    index = output.expanded_idx_to_permuted_idx.clone()
    order = index[:, 0].argsort()
    near = (index[order[1:], 0] == index[order[:-1], 0] + 1) & (index[order[:-1], 0] >= 0)
    for at in near.nonzero().reshape(-1)[:1].tolist():
        index[order[at + 1], 0] = index[order[at], 0]
    return _with_map(output, index)


@producer_fault("MAP-3", smallest="the last token")
def last_token_shares_rows_of_the_first(output: Output, call: Call) -> Output:
    """The last token's entries are the first one's."""
    index = output.expanded_idx_to_permuted_idx.clone()
    if index.shape[0] > 1:
        index[-1] = index[0]
    return _with_map(output, index)


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


@producer_fault("MAP-5", "layer", bugs=("flashinfer#3066",), smallest="ep=2, second rank")
def expert_offset_dropped(layer: MoELayer) -> MoELayer:
    """Local experts are counted from 0 on every rank."""
    return replace(layer, first_expert=0)


@producer_fault("MAP-5", bugs=("flashinfer#3547",), smallest="ep=2, second rank")
def shards_beyond_the_first_are_empty(output: Output, call: Call) -> Output:
    """A rank whose first expert is not 0 finds none of its routes."""
    index = output.expanded_idx_to_permuted_idx
    return output if not call.layer.first_expert else _with_map(output, torch.full_like(index, -1))


@producer_fault("MAP-5", bugs=("flashinfer#4017",), smallest="ep=2")
def absent_slots_get_rows(output: Output, call: Call) -> Output:
    """Slots whose expert is elsewhere are given rows of their own."""
    index, rows = output.expanded_idx_to_permuted_idx, output.gemm2_permuted
    absent = index < 0
    extra = rows.new_zeros(int(absent.sum()), rows.shape[1])
    filled = index.clone()
    filled[absent] = torch.arange(len(extra), dtype=torch.int32) + rows.shape[0]
    return _with_map(replace(output, gemm2_permuted=torch.cat([rows, extra])), filled)


@producer_fault("MAP-5", smallest="ep=2, second rank")
def one_route_is_lost(output: Output, call: Call) -> Output:
    """The first token's first valid route is dropped on the second expert-parallel rank."""
    index = output.expanded_idx_to_permuted_idx.clone()
    valid = (index.view(-1) >= 0).nonzero().reshape(-1)
    if call.layer.first_expert and valid.numel():
        index.view(-1)[valid[0]] = -1
    return _with_map(output, index)


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
