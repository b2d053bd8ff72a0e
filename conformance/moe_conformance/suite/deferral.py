"""Steps of conformance tests: getting a deferred output and judging its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from moe_conformance.judging.layer_judge import judge_rank
from moe_conformance.subjects.layer import LayerSubject, RoutedOutput
from moe_conformance.truth.layer_oracle import RankTruth
from moe_conformance.verdicts import ClauseBrokenError
from moe_contract import Activation, UnfinalizedMoEOutput, Violation, is_unfinalized


def deferred(layer: LayerSubject) -> list[RoutedOutput]:
    """Every rank's output with deferral on; all must be pending, unless the method is declared never to defer."""
    layer.require_support(deferral=True)
    outputs = layer.run()
    layer.require_form(outputs, layer.config())  # what is neither form is OUT-1's, not a question of when to defer
    for rank, output in enumerate(outputs):
        if not is_unfinalized(output):
            raise ClauseBrokenError([finalized_too_soon(output, rank)])
    return outputs


def finalized_too_soon(output: object, rank: int) -> Violation:
    """DEFER-1: a finalized output where deferral was on."""
    kind = "a finalized tensor" if isinstance(output, Tensor) else type(output).__name__
    return Violation(
        clause="DEFER-1", field="routed", got=kind, expected="an unfinalized output: deferral is on", rank=rank
    )


def judge_rows(layer: LayerSubject, outputs: Sequence[RoutedOutput], *, tokens: Tensor | None = None) -> None:
    """The contract's checks, then rows and weights of every rank against their bounds.

    ``tokens``: the order in which the call had the case's tokens; None for their own.
    """
    layer.require_contract(outputs)
    for rank, output in enumerate(outputs):
        pending = _pending(output)
        if tokens is not None:
            pending = _in_order(pending, tokens.argsort())
        judgement = judge_rank(pending, _rows_truth(layer, rank), rank, layer.clause, layer.parts[rank])
        layer.record(judgement.headroom)
        if judgement.violation is not None:
            raise ClauseBrokenError([judgement.violation], judgement.headroom)


def _rows_truth(layer: LayerSubject, rank: int) -> RankTruth:
    """The rank's truth. Sums of small integers are exact in float32 in every order, so their rows have no error but
    the one rounding to the activation dtype, and are held to it; relu squared alone keeps integers integers."""
    truth, case = layer.truth(rank), layer.case
    integers = case.stratum == "lattice" and case.activation is Activation.RELU2
    declared = layer.declaration
    if not integers or declared.intermediate_dtype != "float32" or declared.quantization != "none":
        return truth
    rows = truth.rows.to(layer.parts[rank].dtype).double()
    return replace(truth, rows=rows, row_bounds=rows.new_zeros(rows.shape))


def _in_order(output: UnfinalizedMoEOutput, tokens: Tensor) -> UnfinalizedMoEOutput:
    """The same rows seen by tokens in another order."""
    chosen = tokens.to(output.expert_weights.device)
    weights, index = output.expert_weights[chosen], output.expanded_idx_to_permuted_idx[chosen]
    return replace(output, expert_weights=weights, expanded_idx_to_permuted_idx=index)


def _pending(output: RoutedOutput) -> UnfinalizedMoEOutput:
    if isinstance(output, Tensor):
        raise ClauseBrokenError([finalized_too_soon(output, 0)])
    return output
