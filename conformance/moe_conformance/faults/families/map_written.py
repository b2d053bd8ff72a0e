"""MAP: producers that hand over a wrong map."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moe_conformance.faults import delta_producer
from moe_conformance.faults.delta_producer import Call
from moe_conformance.faults.model import Fault
from moe_contract import MoELayer, UnfinalizedMoEOutput

FAULTS: list[Fault] = []
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
