"""Steps that conformance tests share: getting a deferred output, comparing calls, and being refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from moe_conformance.cases.tail_data import TailInputs
from moe_conformance.judging.judge import bound_ratio, same_bits
from moe_conformance.judging.layer_judge import judge_rank
from moe_conformance.subjects.calls import first_line
from moe_conformance.subjects.layer import LayerSubject, RoutedOutput
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.truth.layer_oracle import RankTruth
from moe_conformance.verdicts import BackendError, ClauseBrokenError, OverClaimedError
from moe_contract import (
    Activation,
    ContractViolation,
    TailOutput,
    UnfinalizedMoEOutput,
    UnsupportedError,
    Violation,
    is_unfinalized,
)
from moe_contract.outputs import require_unfinalized

REFUSALS = (UnsupportedError, ValueError, TypeError)
"""What a backend raises to refuse: UnsupportedError, a ContractViolation (a ValueError), ValueError or TypeError."""


def with_routed(inputs: TailInputs, change: Callable[[UnfinalizedMoEOutput], UnfinalizedMoEOutput]) -> TailInputs:
    """The same inputs with every rank's triple changed."""
    return inputs.with_outputs(
        [replace(output, routed=change(require_unfinalized(output))) for output in inputs.outputs]
    )


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


def require_within(
    result: Tensor, value: Tensor, bound: Tensor, *, clause: str, field: str, rank: int, layer: LayerSubject
) -> None:
    """Raises where ``result [T, H]`` is not within ``bound`` of ``value``; NaN is not. Records the headroom."""
    got = result.cpu()
    ratio = bound_ratio(got, value.cpu(), bound.cpu())
    headroom = float(ratio.max()) if ratio.numel() else 0.0
    layer.record(headroom)
    if headroom <= 1.0:
        return
    token, column = divmod(int(ratio.argmax()), value.shape[1])
    found = Violation(
        clause=clause,
        field=field,
        got=f"{float(got[token, column]):.7g}",
        expected=f"{float(value[token, column]):.7g}",
        bound=float(bound[token, column]),
        rank=rank,
        token=token,
        column=column,
        count=int((ratio > 1.0).sum()),
    )
    raise ClauseBrokenError([found], headroom)


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


def require_identical(
    tail: TailSubject, first: Sequence[TailOutput], second: Sequence[TailOutput], what: str, clause: str | None = None
) -> None:
    """Raises when two calls that must give the same bits on each rank do not."""
    for rank, (a, b) in enumerate(zip(first, second, strict=True)):
        for name in ("residual_out", "norm_out"):
            require_same(getattr(a, name), getattr(b, name), clause or tail.clause, name, what, rank)


def require_same(a: Tensor, b: Tensor, clause: str, field: str, what: str, rank: int | None = None) -> None:
    """Raises at the first element whose bits differ."""
    if same_bits(a, b):
        return
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ClauseBrokenError(
            [_difference(clause, field, f"{list(b.shape)} {b.dtype}", f"{list(a.shape)} {a.dtype}", what)]
        )
    differs = ~((a == b) | (a.isnan() & b.isnan()))
    if not bool(differs.any()):
        differs = a.signbit() != b.signbit()
    place = differs.reshape(a.shape[0], -1).nonzero()[0].tolist()
    token, column = place if len(place) == 2 else (place[0], 0)
    got, expected = float(b.reshape(b.shape[0], -1)[token, column]), float(a.reshape(a.shape[0], -1)[token, column])
    found = _difference(clause, field, f"{got:.9g}", f"the same bits, {expected:.9g}", what)
    update = {"rank": rank, "token": token, "column": column, "value": got, "count": int(differs.sum())}
    raise ClauseBrokenError([found.model_copy(update=update)])


def _difference(clause: str, field: str, got: str, expected: str, what: str) -> Violation:
    return Violation(clause=clause, field=field, got=got, expected=expected, hint=f"changed by: {what}")


def refusal(call: Callable[[], object]) -> str | None:
    """The one-line message with which a backend refuses; None when it returns.

    A refusal is an exception of REFUSALS with a message. Any other exception is a crash.
    """
    try:
        call()
    except OverClaimedError as error:
        return _message(error.__cause__ or error)
    except ClauseBrokenError as error:
        if isinstance(error.__cause__, ContractViolation):
            return _message(error.__cause__)
        raise
    except BackendError as error:
        if isinstance(error.__cause__, REFUSALS):
            return _message(error.__cause__)
        raise
    return None


def _message(error: BaseException) -> str:
    message = first_line(error)
    if message == "(no message)":
        raise BackendError(f"refused with {type(error).__name__} and no message; say what was expected and what came")
    return message


def require_refused_or_right(tail: TailSubject, handed: TailInputs, truth: TailInputs) -> None:
    """Inputs that break the contract are refused, or at least do no harm: the result is that of ``truth``."""
    results: list[list[TailOutput]] = []
    if refusal(lambda: results.append(tail.run(handed))) is not None:
        return
    try:
        tail.judge(results[0], truth, controls=False)
    except ClauseBrokenError as error:
        # Whatever comes out wrong, what it was handed is the cause: on whole inputs other tests judge the same steps.
        blamed = [violation.model_copy(update={"clause": tail.clause}) for violation in error.violations]
        raise ClauseBrokenError(blamed, error.headroom) from error


def blamed_on(error: ClauseBrokenError, clause: str, why: str) -> ClauseBrokenError:
    """The same failure blamed on ``clause``, with ``why`` before what was known of it."""
    first = error.violations[0]
    hint = f"{why} ({first.hint})" if first.hint else why
    return ClauseBrokenError([first.model_copy(update={"clause": clause, "hint": hint}), *error.violations[1:]],
                             error.headroom)  # fmt: skip


def require_refused(tail: TailSubject, handed: TailInputs, what: str) -> None:
    """Inputs that break the contract are refused with a message."""
    if refusal(lambda: tail.run(handed)) is None:
        expected = "a refusal (UnsupportedError, ValueError or TypeError with a message)"
        raise ClauseBrokenError(
            [Violation(clause=tail.clause, field="output", got=f"a result for {what}", expected=expected)]
        )


def require_unwritten(before: Tensor, after: Tensor, field: str, rank: int, clause: str = "OUT-4") -> None:
    """Raises when an input was written."""
    if same_bits(before, after):
        return
    raise ClauseBrokenError(
        [Violation(clause=clause, field=field, got="written by the call", expected="unchanged inputs", rank=rank)]
    )
