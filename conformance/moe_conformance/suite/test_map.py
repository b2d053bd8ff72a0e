"""MAP: from (token, slot) to row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.cases.case import TailCase
from moe_conformance.cases.tail_data import TailInputs, with_routed
from moe_conformance.marks import clause, layers, several_ranks, tails
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.suite.comparisons import blamed_on
from moe_conformance.suite.deferral import deferred, judge_rows
from moe_conformance.suite.refusals import require_refused
from moe_conformance.verdicts import ClauseBrokenError, UnsupportedCaseError
from moe_contract import UnfinalizedMoEOutput
from moe_contract.checks import check_expert_parallel_group
from moe_contract.dtypes import torch_dtype

TWO_TO_31 = 2**31
"""Elements from which a 32-bit signed offset is negative."""


def _told_apart(case: TailCase) -> bool:
    """T and K differ, so that [T, K] and [K, T] have other shapes; both above 1, so that neither is flat."""
    return case.tokens > 1 and case.top_k > 1 and case.tokens != case.top_k


@clause("MAP-1")
@layers({}, {"tokens": 2, "top_k": 3}, where=several_ranks)
def test_map_is_token_major_int32(layer: LayerSubject) -> None:
    """A producer's map is int32, [T, K], contiguous, token-major."""
    judge_rows(layer, deferred(layer))


@clause("MAP-1")
@tails({}, {"tokens": 2, "top_k": 3}, where=_told_apart)
def test_flat_map_is_refused(tail: TailSubject) -> None:
    """A flat [T * K] map is refused; read as one token it makes top_k T * K and runs past the weights."""
    require_refused(tail, _with_map(tail, lambda index: index.reshape(-1)), "a flat map")


@clause("MAP-1")
@tails({}, {"tokens": 2, "top_k": 3}, where=_told_apart)
def test_slot_major_map_is_refused(tail: TailSubject) -> None:
    """A slot-major [K, T] map is refused."""
    require_refused(tail, _with_map(tail, lambda index: index.T.contiguous()), "a slot-major map")


@clause("MAP-1")
@tails({"stratum": "normal"}, {"stratum": "normal", "tokens": 2, "top_k": 3}, where=_told_apart)
def test_map_is_read_token_major(tail: TailSubject) -> None:
    """A consumer reads entry t * K + k as slot k of token t."""
    tail.judge_residual(tail.run())


@clause("MAP-1")
@tails({})
def test_int64_map_is_refused(tail: TailSubject) -> None:
    """A map that is not int32 is refused: read as int32 every second entry would be 0."""
    require_refused(tail, _with_map(tail, lambda index: index.long()), "an int64 map")


@clause("MAP-2")
@layers({}, {"ep": 2}, where=several_ranks)
def test_entries_are_minus_one_or_a_row(layer: LayerSubject) -> None:
    """Every entry is -1 or in [0, P)."""
    layer.require_contract(deferred(layer))


@clause("MAP-3")
@layers({}, {"skew": True}, where=several_ranks)
def test_entries_are_distinct(layer: LayerSubject) -> None:
    """No two routes share a row."""
    layer.require_contract(deferred(layer))


@clause("MAP-4")
@tails(
    {"absent": "quarter"},
    {"absent": "token", "shared": True},
    {"absent": "token"},
    {"absent": "all", "shared": True},
    {"absent": "quarter", "weights_dtype": "float32"},
)
def test_absent_expert_contributes_nothing(tail: TailSubject) -> None:
    """A slot of -1 adds exactly +0, and a token of only -1 gets the shared output alone."""
    tail.judge_residual(tail.run())


@clause("MAP-4")
@tails({"absent": "quarter"}, {"absent": "all"})
def test_absent_expert_contributes_nothing_even_with_a_nan_weight(tail: TailSubject) -> None:
    """A consumer skips -1 slots even when their weight is NaN."""
    tail.judge_residual(tail.run(with_routed(tail.inputs, _with_nan_weights)))


@clause("MAP-4")
@tails({"absent": "quarter"}, {"absent": "all"})
def test_absent_expert_contributes_nothing_even_with_a_nan_row_zero(tail: TailSubject) -> None:
    """A consumer skips -1 slots even when row 0, which a clamped index would read, is NaN."""
    tail.judge_residual(tail.run(with_routed(tail.inputs, _with_nan_row_zero)))


@clause("MAP-5")
@layers({"ep": 2}, {"ep": 4}, {"ep": 16}, where=several_ranks)
def test_every_route_is_on_exactly_one_expert_parallel_rank(layer: LayerSubject) -> None:
    """Over the expert-parallel ranks every (token, slot) is valid once, with expert offsets above 0."""
    if layer.case.ep == 1:
        raise UnsupportedCaseError("one expert-parallel rank holds every expert")
    outputs = deferred(layer)
    layer.require_contract(outputs)
    per_group = layer.case.ranks // layer.case.ep
    violations = check_expert_parallel_group(outputs[::per_group])
    if violations:
        raise ClauseBrokenError(violations)
    judge_rows(layer, outputs)


@clause("MAP-6")
@tails({"tokens": 2, "top_k": 2, "ranks": 1, "hidden_size": 7168, "dtype": "bfloat16"})
def test_rows_beyond_two_to_31_elements_are_addressed(tail: TailSubject) -> None:
    """A row whose offset in elements passes 2^31 is read where it is."""
    far = with_routed(tail.inputs, lambda routed: _far_away(routed, tail.case))
    outputs = tail.run(far)
    try:
        tail.judge_residual(outputs)
    except ClauseBrokenError as error:
        tail.judge_residual(tail.run())
        why = "right where the same rows begin at 0: an offset from 2^31 elements on wrapped in 32 bits"
        raise blamed_on(error, "MAP-6", why) from error


def _with_map(tail: TailSubject, change: Callable[[Tensor], Tensor]) -> TailInputs:
    return with_routed(
        tail.inputs,
        lambda routed: replace(routed, expanded_idx_to_permuted_idx=change(routed.expanded_idx_to_permuted_idx)),
    )


def _with_nan_weights(routed: UnfinalizedMoEOutput) -> UnfinalizedMoEOutput:
    """NaN as the weight of every -1 slot."""
    weights = torch.where(routed.expanded_idx_to_permuted_idx < 0, math.nan, routed.expert_weights)
    return replace(routed, expert_weights=weights)


def _with_nan_row_zero(routed: UnfinalizedMoEOutput) -> UnfinalizedMoEOutput:
    """One more row in front, of NaN; every entry moves up by one."""
    rows, index = routed.gemm2_permuted, routed.expanded_idx_to_permuted_idx
    front = torch.full((1, rows.shape[1]), math.nan, dtype=rows.dtype)
    moved = torch.where(index >= 0, index + 1, index)
    return replace(routed, gemm2_permuted=torch.cat([front, rows]), expanded_idx_to_permuted_idx=moved)


def _far_away(routed: UnfinalizedMoEOutput, case: TailCase) -> UnfinalizedMoEOutput:
    """The same rows behind 2^31 elements that are never touched: memory that is not written costs nothing."""
    rows, index = routed.gemm2_permuted, routed.expanded_idx_to_permuted_idx
    before = -(-TWO_TO_31 // case.hidden_size)
    far = torch.empty(before + rows.shape[0], case.hidden_size, dtype=torch_dtype(case.dtype))
    far[before:] = rows
    moved = torch.where(index >= 0, index + before, index).to(torch.int32)
    return replace(routed, gemm2_permuted=far, expanded_idx_to_permuted_idx=moved)
