"""Steps of conformance tests: comparing a result with the truth, with another call, or with itself before."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_conformance.judging.judge import bound_ratio, same_bits
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.verdicts import ClauseBrokenError
from moe_contract import TailOutput, Violation


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


def blamed_on(error: ClauseBrokenError, clause: str, why: str) -> ClauseBrokenError:
    """The same failure blamed on ``clause``, with ``why`` before what was known of it."""
    first = error.violations[0]
    hint = f"{why} ({first.hint})" if first.hint else why
    return ClauseBrokenError([first.model_copy(update={"clause": clause, "hint": hint}), *error.violations[1:]],
                             error.headroom)  # fmt: skip


def require_unwritten(before: Tensor, after: Tensor, field: str, rank: int, clause: str = "OUT-4") -> None:
    """Raises when an input was written."""
    if same_bits(before, after):
        return
    raise ClauseBrokenError(
        [Violation(clause=clause, field=field, got="written by the call", expected="unchanged inputs", rank=rank)]
    )
