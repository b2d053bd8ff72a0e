"""NUM-1 and NUM-2: one rounding too many, narrow accumulators, truncation, and orders that change from run to run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.faults import delta_producer, plain_tail
from moe_conformance.faults.delta_producer import Call
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail, sum_rounded_at_each
from moe_contract import RoundingProfile, RoutingMethod, UnfinalizedMoEOutput

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)
producer_fault = partial(delta_producer.producer_fault, into=FAULTS)
RUNS = count()
LONGEST_FAST_PATH = 4
"""Top-k up to which a fast path adds in 16 bits."""


def _rounded_sum(terms: Tensor, dtype: torch.dtype) -> Tensor:
    """Every product and every sum rounded to ``dtype``."""
    total = torch.zeros_like(terms[:, 0], dtype=dtype)
    for slot in range(terms.shape[1]):
        total = total + terms[:, slot].to(dtype)
    return total.float()


@consumer_fault(
    "NUM-1", bugs=("TensorRT-LLM#16778",), smallest="K=8: one large term and seven below half a unit in its last place"
)
class RoundsEachTerm(PlainTail):
    """Float32 sums are declared, each term is rounded to the activation dtype."""

    def add_terms(self, terms: Tensor) -> Tensor:
        """Profile A's sum."""
        return _rounded_sum(terms, self.capacity.dtype)


@consumer_fault(
    "NUM-1", bugs=("vllm#46643",), smallest="K=3: one large term and two below half a unit in its last place"
)
class FastPathAddsIn16Bits(PlainTail):
    """Up to K = 4 the sum is in 16 bits, above it in float32."""

    def add_terms(self, terms: Tensor) -> Tensor:
        """Depends on K."""
        narrow = terms.shape[1] <= LONGEST_FAST_PATH
        return _rounded_sum(terms, self.capacity.dtype) if narrow else super().add_terms(terms)


@consumer_fault("NUM-1", smallest="two ranks whose sum rounds")
class RoundsAtEachRank(PlainTail):
    """Profile C is declared, but the sum over ranks is rounded as B's is."""

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """Rounded after each."""
        return sum_rounded_at_each([part.to(self.capacity.dtype) for part in parts])


@consumer_fault("NUM-1", smallest="any value that rounds")
class TruncatesWhatItPublishes(PlainTail):
    """The published part is truncated, not rounded."""

    def publish(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """Towards zero."""
        return _truncated(local, dtype)


@consumer_fault("NUM-1", smallest="any value that rounds")
class TruncatesTheResidual(PlainTail):
    """The stored residual is truncated, not rounded."""

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """Towards zero."""
        return _truncated(total + residual.float(), residual.dtype)


@consumer_fault("NUM-1", smallest="two ranks and a residual that rounds")
class RoundsTheSumBeforeTheResidual(PlainTail):
    """One rounding too many: the reduced sum is stored in 16 bits before the residual is added."""

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """Rounded in between."""
        return super().add_residual(total.to(residual.dtype).float(), residual)


@consumer_fault("NUM-1", smallest="rows below 2^-14 in float16; any product with more than 8 bits in bfloat16")
class ProductsIn16Bits(PlainTail):
    """Weight times row is rounded to 16 bits before it is added in float32."""

    def terms(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Rounded products."""
        return super().terms(routed).to(self.capacity.dtype).float()


@consumer_fault("NUM-1", smallest="K=8, terms that cancel")
class AccumulatorOf13Bits(PlainTail):
    """The accumulator keeps 13 bits and truncates, as some tensor cores do."""

    def add_terms(self, terms: Tensor) -> Tensor:
        """float32 with its low bits cleared after each addition."""
        total = torch.zeros_like(terms[:, 0])
        for slot in range(terms.shape[1]):
            bits = (total + terms[:, slot]).contiguous().view(torch.int32)
            total = (bits & ~0x7FF).view(torch.float32)
        return total


class _ProfileB(PlainTail):
    """Declares and keeps profile B: rounded at each rank."""

    declares: ClassVar[dict[str, Any]] = {"profile": RoundingProfile.LOCAL_FP32}

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """Rounded after each."""
        return sum_rounded_at_each([part.to(self.capacity.dtype) for part in parts])


@consumer_fault("NUM-1", smallest="K=8: one large term and seven below half a unit in its last place")
class ProfileBDeclaredAKept(_ProfileB):
    """Profile B is declared, the local sum is rounded at each term as A's is."""

    def add_terms(self, terms: Tensor) -> Tensor:
        """Profile A's sum."""
        return _rounded_sum(terms, self.capacity.dtype)


@producer_fault("NUM-1", smallest="T=1")
def intermediate_rounded_to_16_bits(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """Rows lose three more bits than the activation dtype has, as an 8-bit intermediate makes them."""
    rows = output.gemm2_permuted
    coarse = rows.view(torch.int16) & ~0x7
    return replace(output, gemm2_permuted=coarse.view(rows.dtype))


@producer_fault("NUM-1", smallest="the last row of the last token")
def one_row_slightly_off(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """One row of many is 2 % too large, as one wrong block scale makes it."""
    rows, index = output.gemm2_permuted.clone(), output.expanded_idx_to_permuted_idx
    valid = index[index >= 0]
    if valid.numel():
        rows[int(valid[-1])] *= 1.02
    return replace(output, gemm2_permuted=rows)


@producer_fault("NUM-1", smallest="T=1")
def last_column_of_rows_is_zero(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """The last column of every row was not computed."""
    rows = output.gemm2_permuted.clone()
    rows[:, -1] = 0
    return replace(output, gemm2_permuted=rows)


@consumer_fault("NUM-2", bugs=("sglang#40105",), smallest="the same inputs twice")
class AtomicOrder(PlainTail):
    """Terms are added atomically, in an order that changes from run to run."""

    def add_terms(self, terms: Tensor) -> Tensor:
        """What another order is off by: far below the bound, and enough to round another way now and then."""
        total = super().add_terms(terms)
        off = (next(RUNS) % 3 - 1) * 2.0**-17  # counted, not drawn: no two runs in a row are alike
        return torch.where(total == total.round(), total, total * (1.0 + off))


@producer_fault(
    "NUM-2",
    bugs=("sglang#40105",),
    base="reference-fp32-weights",
    weights_dtypes=frozenset({"float32"}),
    smallest="the same inputs twice",
)
def routing_weights_vary(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """The last bit of float32 weights, which is within their bound, changes from run to run."""
    if call.layer.routing.method is RoutingMethod.PRECOMPUTED:
        return output  # verbatim: there any change is WGT-3's
    weights = output.expert_weights.clone()
    weights.view(torch.int32).bitwise_xor_(torch.randint(0, 2, weights.shape, dtype=torch.int32))
    return replace(output, expert_weights=weights)


def _truncated(value: Tensor, dtype: torch.dtype) -> Tensor:
    rounded = value.to(dtype)
    beyond = rounded.float().abs() > value.abs()
    lower = (rounded.view(torch.int16) - 1).view(dtype)
    return torch.where(beyond, lower, rounded)
