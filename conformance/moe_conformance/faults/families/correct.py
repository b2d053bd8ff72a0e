"""Correct variants: other orders, other layouts, other tiles. None of them may be blamed for anything."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.faults import delta_producer, plain_tail
from moe_conformance.faults.bases import base_consumer, base_producer
from moe_conformance.faults.delta_producer import Call
from moe_conformance.faults.model import Planted, Variant
from moe_conformance.faults.plain_tail import PlainTail, sum_rounded_at_each
from moe_contract import Determinism, RoundingProfile, ScalePlacement, UnfinalizedMoEOutput

VARIANTS: list[Variant] = []
right_tail = partial(plain_tail.right_tail, VARIANTS)
right_producer = partial(delta_producer.right_producer, into=VARIANTS)
Output = UnfinalizedMoEOutput


@right_tail()
class Plain(PlainTail):
    """The tail that the wrong ones are made from."""


@right_tail()
class SlotsInReverse(PlainTail):
    """The top-k sum runs from the last slot to the first."""

    def add_terms(self, terms: Tensor) -> Tensor:
        """Backwards."""
        return super().add_terms(terms.flip(1))


@right_tail()
class SlotsInPairs(PlainTail):
    """The top-k sum is a tree."""

    def add_terms(self, terms: Tensor) -> Tensor:
        """Halves added to halves."""
        while terms.shape[1] > 1:
            half = terms.shape[1] // 2
            both = terms[:, :half] + terms[:, half : 2 * half]
            terms = torch.cat([both, terms[:, 2 * half :]], 1)
        return terms[:, 0]


@right_tail()
class FusedMultiplyAdd(PlainTail):
    """Products are not rounded before they are added."""

    def top_k_sum(self, routed: Output) -> Tensor:
        """Each step in float64, rounded once: what a fused instruction gives."""
        index = routed.expanded_idx_to_permuted_idx.long()
        if not routed.gemm2_permuted.shape[0]:
            return super().top_k_sum(routed)
        rows, weights = self.rows(routed, index).double(), self.weights(routed).double()
        total = torch.zeros(index.shape[0], rows.shape[2])
        for slot in range(index.shape[1]):
            fused = (total.double() + rows[:, slot] * weights[:, slot, None]).float()
            total = torch.where((index[:, slot] >= 0)[:, None], fused, total)
        return total


@right_tail()
class RanksInATree(PlainTail):
    """Ranks are summed pairwise, under profile D, which leaves their order open."""

    declares: ClassVar[dict[str, Any]] = {"profile": RoundingProfile.SWITCH}

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """Neighbours first."""
        while len(parts) > 1:
            last = parts[-1:] if len(parts) % 2 else []
            parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + last
        return parts[0]


@right_tail()
class ScaleOnEachWeight(PlainTail):
    """The factor multiplies each weight in float32, as declared."""

    declares: ClassVar[dict[str, Any]] = {"scale_placement": ScalePlacement.WEIGHTS}

    def local(self, output: Any) -> Tensor:
        """Remembers the factor for the weights."""
        self.kept["factor"] = 1.0 if isinstance(output.routed, Tensor) else output.routed_scaling_factor
        return super().local(output)

    def weights(self, routed: Output) -> Tensor:
        """Scaled."""
        factor: float = self.kept["factor"]
        return super().weights(routed) * factor

    def scale(self, routed: Tensor, factor: float) -> Tensor:
        """What the weights do not hold yet."""
        return routed if self.kept["factor"] == factor else super().scale(routed, factor)


@right_tail()
class RoundsAtEachRankAsDeclared(PlainTail):
    """Profile B: float32 within a rank, rounded at each."""

    declares: ClassVar[dict[str, Any]] = {"profile": RoundingProfile.LOCAL_FP32}

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """In 16 bits."""
        return sum_rounded_at_each([part.to(self.capacity.dtype) for part in parts])


@right_tail()
class AnotherOrderEachTime(PlainTail):
    """The top-k sum's order changes from run to run, as declared."""

    declares: ClassVar[dict[str, Any]] = {"determinism": Determinism.VARIES}

    def add_terms(self, terms: Tensor) -> Tensor:
        """Shuffled. Each rank shuffles its own sum, so that all still end with the same bits."""
        return super().add_terms(terms[:, torch.randperm(terms.shape[1])])


@right_tail()
class NormInATree(PlainTail):
    """The mean square is added in a tree of lanes."""

    def mean_square(self, x: Tensor) -> Tensor:
        """Lanes of a power of two."""
        if not x.numel():
            return super().mean_square(x)
        squares = x.float().square()
        width = squares.shape[1]
        squares = torch.nn.functional.pad(squares, (0, -width % 128)).view(len(x), 128, -1).sum(2)
        while squares.shape[1] > 1:
            half = squares.shape[1] // 2
            squares = squares[:, :half] + squares[:, half:]
        return squares / width


def _rows_moved(output: Output, order: Tensor) -> Output:
    """Row i of the result is row ``order[i]`` of the output's."""
    index, place = output.expanded_idx_to_permuted_idx, order.argsort()
    moved = torch.where(index >= 0, place[index.clamp(min=0).long()], -1).to(torch.int32)
    return replace(output, gemm2_permuted=output.gemm2_permuted[order], expanded_idx_to_permuted_idx=moved)


@right_producer()
def as_it_is(output: Output, call: Call) -> Output:
    """The producer that the wrong ones are made from."""
    return output


@right_producer()
def experts_in_reverse_order(output: Output, call: Call) -> Output:
    """The last expert's rows come first."""
    return _rows_moved(output, torch.arange(output.gemm2_permuted.shape[0]).flip(0))


@right_producer()
def more_rows_than_needed(output: Output, call: Call) -> Output:
    """P is 256 larger than it has to be, with infinity in front and behind."""
    rows, index = output.gemm2_permuted, output.expanded_idx_to_permuted_idx
    padded = torch.nn.functional.pad(rows, (0, 0, 128, 128), value=torch.inf)
    moved = torch.where(index >= 0, index + 128, -1).to(torch.int32)
    return replace(output, gemm2_permuted=padded, expanded_idx_to_permuted_idx=moved)


@right_producer()
def slots_in_order_of_experts(output: Output, call: Call) -> Output:
    """Within a token the slots are in another order, weights and map alike."""
    weights = output.expert_weights.flip(1)
    return replace(output, expert_weights=weights.contiguous(),
                   expanded_idx_to_permuted_idx=output.expanded_idx_to_permuted_idx.flip(1).contiguous())  # fmt: skip


@right_producer(tile=128)
def another_tile(output: Output, call: Call) -> Output:
    """Rows lie 128 apart where a run of them ends, as a larger tile has it."""
    rows, index = output.gemm2_permuted, output.expanded_idx_to_permuted_idx
    spread = torch.full((rows.shape[0] // 8 * 128 + 128, rows.shape[1]), torch.nan, dtype=rows.dtype)
    place = torch.arange(rows.shape[0]) // 8 * 128 + torch.arange(rows.shape[0]) % 8
    spread[place] = rows
    moved = torch.where(index >= 0, place[index.clamp(min=0).long()], -1).to(torch.int32)
    return replace(output, gemm2_permuted=spread, expanded_idx_to_permuted_idx=moved)


def _installed(name: str, what: str, side: str) -> Variant:
    planted = Planted(producer=base_producer(name)) if side == "producer" else Planted(consumer=base_consumer(name))
    return Variant(f"{name}-{side}", what, "correct", lambda: planted)


VARIANTS += [
    _installed("reference", "Profile C, with every quantised output.", "consumer"),
    _installed("reference-a", "Profile A: rounded at each step.", "consumer"),
    _installed("reference-b", "Profile B: rounded at each rank.", "consumer"),
    _installed("reference-route-major", "Route-major rows.", "producer"),
    _installed("reference-folded", "The factor folded into the weights.", "producer"),
    _installed("reference-fp32-weights", "Routing weights in float32.", "producer"),
    _installed("reference-nvfp4", "Weights and inputs in NVFP4.", "producer"),
]
