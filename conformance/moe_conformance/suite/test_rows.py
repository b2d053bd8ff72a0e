"""ROWS: the permuted rows."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from moe_conformance.cases.tail_data import with_routed
from moe_conformance.marks import clause, layers, several_ranks, several_tokens, tails
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.suite.comparisons import require_identical
from moe_conformance.suite.deferral import deferred, judge_rows
from moe_conformance.suite.refusals import require_refused_or_right
from moe_contract import Determinism, UnfinalizedMoEOutput


@clause("ROWS-1")
@layers(where=several_ranks)
def test_rows_are_compact_and_aligned(layer: LayerSubject) -> None:
    """A producer's rows are [P, H] in the activation dtype, compact, with an aligned base."""
    layer.require_contract(deferred(layer))


@clause("ROWS-2")
@tails({}, {"route_major": True, "absent": "quarter"}, where=several_tokens)
def test_unreferenced_row_never_reaches_a_result(tail: TailSubject) -> None:
    """NaN in every row that no map entry names changes nothing."""
    tail.judge(tail.run())


@clause("ROWS-2")
@tails({})
def test_unreferenced_infinity_never_reaches_a_result(tail: TailSubject) -> None:
    """Infinity in every row that no map entry names changes nothing either."""
    poisoned = with_routed(tail.inputs, lambda routed: _with_poison(routed, math.inf))
    tail.judge(tail.run(poisoned), poisoned)


@clause("ROWS-3")
@layers({}, {"method": "default"}, {"method": "topk"}, {"method": "sigmoid"}, where=several_ranks)
def test_rows_carry_no_routing_weight(layer: LayerSubject) -> None:
    """Each row is its expert's output before any routing weight."""
    judge_rows(layer, deferred(layer))


@clause("ROWS-4")
@layers({}, {"hidden_size": 320}, where=several_ranks)  # which kernels pad to their tile of 128 or 256
def test_rows_have_the_logical_width(layer: LayerSubject) -> None:
    """A deferred output is H wide; a kernel that pads finalizes instead."""
    layer.require_contract(layer.run())


@clause("ROWS-4")
@tails({})
def test_padded_rows_are_refused_or_trimmed(tail: TailSubject) -> None:
    """Rows wider than the hidden size are refused, or their padding reaches nothing."""
    require_refused_or_right(tail, with_routed(tail.inputs, _padded), tail.inputs)


@clause("ROWS-5")
@tails({"stratum": "normal"}, where=several_tokens)
def test_result_does_not_depend_on_the_number_of_rows(tail: TailSubject) -> None:
    """The same routes among more rows, in another order, give the same bits, where a repeat does at all (NUM-2)."""
    moved = with_routed(tail.inputs, _moved)
    if tail.declaration.determinism is Determinism.VARIES:
        tail.judge(tail.run(moved), moved)
        return
    first = tail.run()
    require_identical(tail, first, tail.run(), "a repeat", clause="NUM-2")
    require_identical(tail, first, tail.run(moved), "more rows in another order")


@clause("ROWS-5")
@layers({"skew": True}, {"skew": True, "ep": 2}, where=several_ranks)
def test_skewed_routing_changes_no_row(layer: LayerSubject) -> None:
    """All tokens on the same experts, on one rank of an expert-parallel group: rows and map stay right."""
    judge_rows(layer, deferred(layer))


@clause("ROWS-6")
@layers(
    {"biases": True},
    {"biases": True, "activation": "gelu-tanh"},
    {"biases": True, "activation": "relu2"},
    {"biases": True, "activation": "swiglu-oai"},
    where=several_ranks,
)
def test_down_bias_is_in_its_row_once(layer: LayerSubject) -> None:
    """An expert's down bias is in its row once over the ranks, so that it gets the routing weight."""
    judge_rows(layer, deferred(layer))


def _with_poison(routed: UnfinalizedMoEOutput, value: float) -> UnfinalizedMoEOutput:
    """Every unreferenced row set to ``value``."""
    used = torch.zeros(routed.gemm2_permuted.shape[0], dtype=torch.bool)
    used[routed.expanded_idx_to_permuted_idx[routed.expanded_idx_to_permuted_idx >= 0].long()] = True
    rows = torch.where(used.unsqueeze(1), routed.gemm2_permuted, value)
    return replace(routed, gemm2_permuted=rows)


def _padded(routed: UnfinalizedMoEOutput) -> UnfinalizedMoEOutput:
    """64 columns more, as a quantised GEMM pads; 1 in each, so that a mean over the padded width shows."""
    extra = torch.ones(routed.gemm2_permuted.shape[0], 64, dtype=routed.gemm2_permuted.dtype)
    return replace(routed, gemm2_permuted=torch.cat([routed.gemm2_permuted, extra], 1))


def _moved(routed: UnfinalizedMoEOutput) -> UnfinalizedMoEOutput:
    """The rows in reverse order behind 128 more poisoned ones."""
    rows, index = routed.gemm2_permuted, routed.expanded_idx_to_permuted_idx
    poison = torch.full((128, rows.shape[1]), math.nan, dtype=rows.dtype)
    last = 128 + rows.shape[0] - 1
    return replace(
        routed,
        gemm2_permuted=torch.cat([poison, rows.flip(0)]),
        expanded_idx_to_permuted_idx=torch.where(index >= 0, last - index, -1),
    )
