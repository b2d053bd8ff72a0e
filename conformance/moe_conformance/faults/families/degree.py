"""Faults of degree: right almost everywhere, wrong for one slot, token, column, rank, size or call."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_conformance.faults import delta_producer, plain_tail
from moe_conformance.faults.delta_producer import Call
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail
from moe_contract import MoEOutput, UnfinalizedMoEOutput

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)
producer_fault = partial(delta_producer.producer_fault, into=FAULTS)
EVERY = 1000
"""One slot in so many is wrong."""


@consumer_fault("NUM-1", smallest="1000 slots")
class OneSlotInAThousandLost(PlainTail):
    """Every thousandth slot adds nothing."""

    def terms(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Zero at those."""
        terms = super().terms(routed)
        terms.view(-1, terms.shape[-1])[EVERY - 1 :: EVERY] = 0
        return terms


@consumer_fault("NUM-1", smallest="T=17: 2^4 + 1")
class LastTokenOfAnOddBatch(PlainTail):
    """With T = 2^n + 1, from 17 on, the last token's top-k sum is the one before."""

    def top_k_sum(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """One token off at the end."""
        total = super().top_k_sum(routed)
        tokens = total.shape[0]
        if tokens > 16 and (tokens - 1) & (tokens - 2) == 0:
            total[-1] = total[-2]
        return total


@consumer_fault("RED-1", smallest="two ranks, the last column")
class LastColumnOfAPeerMissing(PlainTail):
    """A peer's last column is not summed."""

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """Zero there."""
        if len(parts) > 1:
            parts[-1][:, -1] = 0
        return super().add_ranks(parts)


@consumer_fault("RED-5", smallest="the second call")
class ScaleOfTheFirstCall(PlainTail):
    """Weights of the second call and later are those of the first, where their shape is the same."""

    def weights(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """The first call's of this shape."""
        weights = super().weights(routed)
        first: Tensor = self.kept.setdefault(str(weights.shape), weights)
        return first


@consumer_fault("RED-5", smallest="a call after one of no tokens")
class CallAfterAnEmptyOne(PlainTail):
    """After a call without tokens the next one reads nothing."""

    def reduce(self, local: Tensor) -> Tensor:
        """Zeros once."""
        total = super().reduce(local)
        empty, self.kept["empty"] = self.kept.get("empty", False), not total.shape[0]
        return torch.zeros_like(total) if empty else total


@consumer_fault("OUT-1", smallest="one element of -0 in a finalized tensor")
class NegativeZeroIsAnEmptySlot(PlainTail):
    """An element of -0 that was sent is taken for one that has not come, and what the buffer held is used."""

    def parts(self, local: Tensor) -> list[Tensor]:
        """1 in its place."""
        parts = super().parts(local)
        empty = [(part == 0) & part.signbit() for part in parts]
        return [torch.where(gone, 1.0, part.float()).to(part.dtype) for gone, part in zip(empty, parts, strict=True)]


@consumer_fault("MAP-4", smallest="the last token, all of its slots -1")
class AbsentSlotsOfTheLastToken(PlainTail):
    """Only in the last token a slot of -1 reads row 0."""

    def terms(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Unmasked in the last token."""
        terms = super().terms(routed)
        if terms.shape[0] and routed.gemm2_permuted.shape[0]:
            index = routed.expanded_idx_to_permuted_idx[-1:].long()
            last = replace(routed, expert_weights=routed.expert_weights[-1:])
            terms[-1:] = self.rows(routed, index) * self.weights(last).unsqueeze(-1)
        return terms


@consumer_fault("SHARED-1", smallest="rank 1 of two")
class SharedLeftOutOnTheLastRank(PlainTail):
    """The last of several ranks forgets its shared output."""

    def add_shared(self, scaled: Tensor, output: MoEOutput) -> Tensor:
        """Nothing there."""
        last = self.group.size > 1 and self.group.rank == self.group.size - 1
        return scaled if last else super().add_shared(scaled, output)


@producer_fault("NUM-1", "any", smallest="the second call of a loaded producer")
def second_call_hands_over_the_first(output: Any, call: Call) -> Any:
    """A loaded producer's second call with a batch of the same size returns the first one's rows."""
    if isinstance(output, Tensor):
        return output
    first = call.kept.setdefault(str(output.expert_weights.shape), output)
    same = first.gemm2_permuted.shape == output.gemm2_permuted.shape
    return replace(output, gemm2_permuted=first.gemm2_permuted.clone()) if same else output


@producer_fault("NUM-1", smallest="two experts in one tile: rows of different experts less than 8 apart")
def experts_that_share_a_tile(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """Where an expert's rows fill more than one tile of 8, those of its last tile are one row off."""
    rows, index = output.gemm2_permuted.clone(), output.expanded_idx_to_permuted_idx
    used = index[index >= 0].sort().values.long()
    spill = used[(used % 8 == 0) & torch.isin(used - 1, used)]
    rows[spill] = rows[spill - 1]
    return replace(output, gemm2_permuted=rows)
