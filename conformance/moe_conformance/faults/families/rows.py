"""ROWS: what is wrong with the rows, or with how a consumer finds them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from moe_conformance.faults import delta_producer, plain_tail
from moe_conformance.faults.delta_producer import Call
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail
from moe_contract import MoELayer, UnfinalizedMoEOutput, UnsupportedError

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)
producer_fault = partial(delta_producer.producer_fault, into=FAULTS)
DENSE_ROWS = 10_000
"""Rows above which a dense combine takes longer than a case may."""
BUCKET = 64
"""Rows by which a bucketed workspace is larger than the routes need."""


@producer_fault("ROWS-1", bugs=("vllm#28841",), smallest="T=1: the strides tell")
def rows_are_a_view_of_padded_columns(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """Rows are the first H columns of a wider buffer, handed on as a view."""
    hidden = output.gemm2_permuted.shape[1]
    wide = torch.nn.functional.pad(output.gemm2_permuted, (0, 192))
    return replace(output, gemm2_permuted=wide[:, :hidden])


@producer_fault("ROWS-1", bugs=("Megatron-LM#4038",))
def row_stride_padded_to_the_next_16(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """Rows are 16 elements further apart than they are wide, as an aligned allocation makes them."""
    rows = output.gemm2_permuted
    buffer = rows.new_zeros(rows.shape[0], rows.shape[1] + 16)
    buffer[:, : rows.shape[1]] = rows
    return replace(output, gemm2_permuted=buffer.as_strided(rows.shape, (rows.shape[1] + 16, 1)))


@producer_fault("ROWS-1")
def rows_start_off_alignment(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """The rows' base address is one element past a multiple of 16 bytes."""
    rows = output.gemm2_permuted
    flat = torch.cat([rows.new_zeros(1), rows.reshape(-1)])
    return replace(output, gemm2_permuted=flat[1:].view(rows.shape))


@producer_fault("ROWS-1", bugs=("flashinfer#3671",))
def rows_by_token_and_slot(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """The row buffer is [T, K, H], as the documentation had it."""
    index = output.expanded_idx_to_permuted_idx.long().clamp(min=0)
    return replace(output, gemm2_permuted=output.gemm2_permuted[index])


@producer_fault("ROWS-1")
def rows_left_in_float32(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """The second GEMM's float32 accumulators are handed over unrounded."""
    return replace(output, gemm2_permuted=output.gemm2_permuted.float())


@consumer_fault("ROWS-2", bugs=("transformers#48205", "Primus-Turbo#345"))
class TailRowsTimesZero(PlainTail):
    """Rows that no token names are multiplied by zero and added: an unwritten NaN survives."""

    def top_k_sum(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """The sum and the rest of the buffer times zero."""
        total = super().top_k_sum(routed)
        if not 0 < routed.gemm2_permuted.shape[0] <= DENSE_ROWS:
            return total
        used = torch.zeros(routed.gemm2_permuted.shape[0], dtype=torch.bool)
        index = routed.expanded_idx_to_permuted_idx
        used[index[index >= 0].long()] = True
        return total + (routed.gemm2_permuted[~used].float() * 0.0).sum(0)


@consumer_fault("ROWS-2", bugs=("flashinfer#5349",))
class DenseCombine(PlainTail):
    """A [T, P] matrix of weights times all rows: an unreferenced NaN row times 0 is NaN."""

    def top_k_sum(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """The product."""
        index = routed.expanded_idx_to_permuted_idx.long()
        if routed.gemm2_permuted.shape[0] > DENSE_ROWS:
            return super().top_k_sum(routed)
        matrix = torch.zeros(index.shape[0], routed.gemm2_permuted.shape[0] + 1)
        matrix.scatter_add_(1, torch.where(index >= 0, index, matrix.shape[1] - 1), self.weights(routed))
        return matrix[:, :-1] @ routed.gemm2_permuted.float()


@consumer_fault("ROWS-2", bugs=("rtp-llm#1325",))
class EveryRowIsData(PlainTail):
    """The row loop runs to P, and rows past the valid ones are scattered to token 0."""

    def top_k_sum(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Rows without a token go to the first."""
        total = super().top_k_sum(routed)
        rows, index = routed.gemm2_permuted, routed.expanded_idx_to_permuted_idx
        if not 0 < rows.shape[0] <= DENSE_ROWS or not total.shape[0]:
            return total
        used = torch.zeros(rows.shape[0], dtype=torch.bool)
        used[index[index >= 0].long()] = True
        total[0] += rows[~used].float().sum(0)
        return total


@producer_fault("ROWS-3")
def rows_already_weighted(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """The second GEMM's epilogue multiplies each row by its routing weight."""
    index = output.expanded_idx_to_permuted_idx
    factor = torch.ones(output.gemm2_permuted.shape[0], dtype=output.gemm2_permuted.dtype)
    factor[index[index >= 0].long()] = output.expert_weights[index >= 0].to(factor.dtype)
    return replace(output, gemm2_permuted=output.gemm2_permuted * factor.unsqueeze(1))


@producer_fault("ROWS-3", smallest="one route of many")
def last_slot_weighted(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """The last slot's rows alone carry their weight."""
    rows, index = output.gemm2_permuted.clone(), output.expanded_idx_to_permuted_idx[:, -1]
    weights = output.expert_weights[:, -1][index >= 0]
    rows[index[index >= 0].long()] *= weights.unsqueeze(1).to(rows.dtype)
    return replace(output, gemm2_permuted=rows)


@producer_fault("ROWS-4", bugs=("vllm#40794",))
def rows_keep_the_padded_width(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """Rows have the GEMM's padded width."""
    return replace(output, gemm2_permuted=torch.nn.functional.pad(output.gemm2_permuted, (0, 64)))


class _TakesWideRows(PlainTail):
    """Does not refuse rows that are wider than H."""

    def check(self, output, residual) -> None:  # type: ignore[no-untyped-def]  # as the base's
        """Trims before it checks."""
        routed = output.routed
        if not isinstance(routed, Tensor) and routed.gemm2_permuted.dim() == 2:
            self.kept["wide"] = routed.gemm2_permuted
            trimmed = routed.gemm2_permuted[:, : residual.shape[1]].contiguous()
            output = replace(output, routed=replace(routed, gemm2_permuted=trimmed))
        super().check(output, residual)


@consumer_fault("ROWS-4", bugs=("flashinfer#2482",))
class PaddedRowsReadAsCompact(_TakesWideRows):
    """Rows are addressed as row * H whatever their real width, so padding columns are read."""

    def rows(self, routed: UnfinalizedMoEOutput, index: Tensor) -> Tensor:
        """Gathered from the flat buffer."""
        hidden = self.capacity.hidden_size
        rows = routed.gemm2_permuted
        if rows.shape[1] == hidden:
            return super().rows(routed, index)
        flat = rows.reshape(-1)
        return flat[: rows.shape[0] * hidden].view(-1, hidden)[index.clamp(min=0)].float()


@consumer_fault("ROWS-4")
class MeanOverThePaddedWidth(_TakesWideRows):
    """Rows are trimmed, but the mean square divides by their padded width."""

    def rows(self, routed: UnfinalizedMoEOutput, index: Tensor) -> Tensor:
        """The logical columns; remembers the width."""
        self.kept["width"] = routed.gemm2_permuted.shape[1]
        return super().rows(routed, index)[..., : self.capacity.hidden_size]

    def mean_square(self, x: Tensor) -> Tensor:
        """Over the padded width."""
        width: int = self.kept.get("width", x.shape[1])
        return x.float().square().sum(-1, keepdim=True) / width


@consumer_fault("ROWS-5", bugs=("flashinfer#2695",), smallest="P above the bucket")
class RowsBeyondTheBucketAreLost(PlainTail):
    """Rows past the routes' bucket, rounded up to 64, are not covered by the grid."""

    def terms(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Zero for rows that the grid does not reach."""
        index = routed.expanded_idx_to_permuted_idx
        covered = -(-index.numel() // BUCKET) * BUCKET + BUCKET
        reached = index < covered if routed.gemm2_permuted.shape[0] <= DENSE_ROWS else index >= 0
        return torch.where(reached.unsqueeze(-1), super().terms(routed), 0.0)


@consumer_fault("ROWS-5", bugs=("flashinfer#3671",), smallest="P far above T * K")
class RefusesALargeP(PlainTail):
    """The size check compares P with T * K, so a call with much padding is refused although it is legal."""

    def check(self, output, residual) -> None:  # type: ignore[no-untyped-def]  # as the base's
        """Refuses where there are 2 * T * K + 64 rows or more."""
        routed = output.routed
        if not isinstance(routed, Tensor):
            rows, routes = routed.gemm2_permuted.shape[0], routed.expert_weights.numel()
            if DENSE_ROWS > rows >= 2 * routes + BUCKET:
                raise UnsupportedError(f"CAP-1: {rows} rows do not fit a workspace for {routes} routes")
        super().check(output, residual)


@consumer_fault("ROWS-5", smallest="two orders of the same rows")
class SumsInRowOrder(PlainTail):
    """Terms are added in the order of their rows, so the bits depend on the tile and the tactic."""

    def top_k_sum(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Slots sorted by row before they are added, in 16 bits more than exact: the order shows in float32."""
        order = routed.expanded_idx_to_permuted_idx.argsort(1)
        terms = self.terms(routed)
        return self.add_terms(terms.gather(1, order.unsqueeze(-1).expand_as(terms)))


@producer_fault("ROWS-5", bugs=("flashinfer#4637",), smallest="all tokens on the same experts")
def expert_capacity_overflows(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """An expert's rows beyond twice the average stay zero: only skewed routing has that many."""
    rows, index = output.gemm2_permuted.clone(), output.expanded_idx_to_permuted_idx
    tokens, top_k = index.shape
    capacity = max(2, 2 * tokens * top_k // call.layer.num_local_experts)
    if tokens > capacity and bool(((index >= 0).sum(0) == tokens).all()) and _in_runs(index):
        rows[index[capacity:].reshape(-1).long()] = 0
    return replace(output, gemm2_permuted=rows)


def _in_runs(index: Tensor) -> bool:
    """Whether each slot's rows follow one another: every token chose the same expert in it."""
    return bool((index[1:] - index[:-1] == 1).all())


@producer_fault("ROWS-6", "layer")
def down_bias_left_out(layer: MoELayer) -> MoELayer:
    """The second GEMM adds no bias."""
    return replace(layer, experts=replace(layer.experts, down_bias=None))


@producer_fault("ROWS-6", "layer")
def down_bias_twice(layer: MoELayer) -> MoELayer:
    """The bias is added by the GEMM and again by the epilogue."""
    bias = layer.experts.down_bias
    return layer if bias is None else replace(layer, experts=replace(layer.experts, down_bias=bias * 2))


@producer_fault("ROWS-6", "layer", smallest="two experts")
def first_experts_bias_for_all(layer: MoELayer) -> MoELayer:
    """Every expert gets the first one's down bias."""
    bias = layer.experts.down_bias
    if bias is None:
        return layer
    return replace(layer, experts=replace(layer.experts, down_bias=bias[:1].expand_as(bias).contiguous()))
