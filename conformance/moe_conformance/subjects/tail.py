"""A consumer with one case: run it on N ranks, judge what it returns stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from moe_conformance.cases.case import TailCase
from moe_conformance.cases.tail_data import TailInputs, make_tail_inputs, map_tensors
from moe_conformance.declared_support import tail_unsupported
from moe_conformance.harness.threads import ThreadRankGroup
from moe_conformance.judging.diagnosis import Cause, diagnose
from moe_conformance.judging.judge import Judgement, judge, same_bits
from moe_conformance.judging.negative_controls import require_controls_rejected
from moe_conformance.subjects.calls import Settings, on_every_rank
from moe_conformance.subjects.signature_checks import checked_output
from moe_conformance.truth.tail_oracle import Truth, norm_truth, residual_truth
from moe_conformance.verdicts import ClauseBrokenError, UnsupportedCaseError
from moe_contract import Consumer, ConsumerDeclaration, MoEOutput, Tail, TailOutput, Violation

cached_inputs = lru_cache(maxsize=4)(make_tail_inputs)
"""Every consumer gets the same inputs, one after the other; each call is handed a copy."""

BeforeCall = Callable[[int, int], None]
"""``before(rank, call)``, run on the rank's own thread before each call."""


@dataclass
class TailSubject:
    """What a consumer test is handed. Public methods raise the exceptions of verdicts.py."""

    name: str
    consumer: Consumer
    case: TailCase
    clause: str
    settings: Settings = field(default_factory=Settings)
    headroom: float | None = None
    """The largest error / bound judged so far; it goes into the report."""

    @property
    def declaration(self) -> ConsumerDeclaration:
        """What the consumer says of itself."""
        return self.consumer.declaration

    @property
    def inputs(self) -> TailInputs:
        """The case's inputs on the CPU. Read-only: calls get copies."""
        return cached_inputs(self.case)

    @property
    def exact(self) -> bool:
        """Whether every order of summation gives the same bits, so that equality is demanded."""
        return self.case.stratum == "lattice"

    def require_support(self) -> None:
        """Raises UnsupportedCaseError where the declaration does not cover the case."""
        reason = tail_unsupported(self.declaration, self.case, self.settings.device)
        if reason is not None:
            raise UnsupportedCaseError(reason)

    def run(self, inputs: TailInputs | None = None) -> list[TailOutput]:
        """One call on every rank, in a tail of its own; results on the CPU, in rank order."""
        return self.run_calls([inputs or self.inputs])[0]

    def run_calls(self, calls: Sequence[TailInputs], before: BeforeCall | None = None) -> list[list[TailOutput]]:
        """Several calls back to back in one opened tail; ``result[call][rank]``."""
        self.require_support()
        return self._run_calls(calls, before)

    def run_unchecked(self) -> list[TailOutput]:
        """One call, whether or not the declaration covers it."""
        return self._run_calls([self.inputs], None)[0]

    def _run_calls(self, calls: Sequence[TailInputs], before: BeforeCall | None) -> list[list[TailOutput]]:
        largest = max(calls, key=lambda call: call.residual.shape[0])
        capacity = largest.capacity(self.case.model_copy(update={"tokens": largest.residual.shape[0]}))
        prepared = [[fresh_copy(call, rank, self.settings.device) for call in calls] for rank in range(self.case.ranks)]

        def one_rank(group: ThreadRankGroup) -> list[TailOutput]:
            tail = self.consumer.open(group, capacity)
            try:
                return [_one_call(tail, group.rank, number, call, before)
                        for number, call in enumerate(prepared[group.rank])]  # fmt: skip
            finally:
                tail.close()

        by_rank = on_every_rank(self.name, self.settings, self.case.ranks, one_rank)
        return [
            [checked_output(self.name, outputs[number], call) for outputs in by_rank]
            for number, call in enumerate(calls)
        ]

    def judge(self, outputs: list[TailOutput], inputs: TailInputs | None = None, *, controls: bool = True) -> None:
        """Stages 2 and 3: residual_out against the oracle, norm_out against the norm of the observed residual."""
        self.judge_residual(outputs, inputs, controls=controls)
        self.judge_norm(outputs, inputs)

    def judge_residual(
        self, outputs: list[TailOutput], inputs: TailInputs | None = None, *, controls: bool = True
    ) -> None:
        """Every rank's ``residual_out``; the first one out of bounds is diagnosed and raised."""
        inputs = inputs or self.inputs
        truth = residual_truth(inputs, self.declaration)
        if controls:
            require_controls_rejected(inputs, truth, exact=self.exact)
        for rank, output in enumerate(outputs):
            if rank and same_bits(output.residual_out, outputs[0].residual_out):
                continue
            judgement = self._record(judge(output.residual_out, truth, exact=self.exact))
            if not judgement.accepted:
                others = [other.residual_out for other in outputs if other is not output]
                elsewhere = any(judge(other, truth, exact=self.exact).accepted for other in others)
                raise ClauseBrokenError(
                    [self._residual_violation(inputs, output, truth, judgement, rank, elsewhere)], judgement.headroom
                )

    def judge_norm(self, outputs: list[TailOutput], inputs: TailInputs | None = None) -> None:
        """Every rank's ``norm_out``, from the residual it returned itself."""
        inputs = inputs or self.inputs
        for rank, output in enumerate(outputs):
            if rank and same_bits(output.norm_out, outputs[0].norm_out):
                continue
            truth = norm_truth(output.residual_out, inputs)
            judgement = self._record(judge(output.norm_out, truth, exact=False))
            if not judgement.accepted:
                clause = self.clause if self.clause.startswith("NORM") else "NORM-1"
                hint = norm_hint(output, truth, inputs)
                raise ClauseBrokenError([violation(clause, "norm_out", judgement, rank, hint)], judgement.headroom)

    def _record(self, judgement: Judgement) -> Judgement:
        self.headroom = max(self.headroom or 0.0, judgement.headroom)
        return judgement

    def _residual_violation(
        self,
        inputs: TailInputs,
        output: TailOutput,
        truth: Truth,
        judgement: Judgement,
        rank: int,
        right_elsewhere: bool,
    ) -> Violation:
        assert judgement.worst is not None
        cause = diagnose(inputs, output.residual_out, truth, judgement.worst, rank)
        if right_elsewhere and (cause is None or cause.clause == "NUM-1"):
            cause = Cause("RED-2", "another rank's result is right: the ranks end with different bits")
        clause = cause.clause if cause else self.clause
        return violation(clause, "residual_out", judgement, rank, cause.sentence if cause else "")


def violation(clause: str, what: str, judgement: Judgement, rank: int, hint: str) -> Violation:
    """The violation of a result that is out of its bound."""
    worst = judgement.worst
    assert worst is not None
    return Violation(
        clause=clause,
        field=what,
        got=f"{worst.got:.7g}",
        expected=f"{worst.expected:.7g}" if worst.bound else f"exactly {worst.expected:.7g}",
        bound=worst.bound or None,
        hint=hint,
        rank=rank,
        token=worst.token,
        column=worst.column,
        value=worst.got,
        count=worst.count,
    )


def norm_hint(output: TailOutput, truth: Truth, inputs: TailInputs) -> str:
    """A norm that is off by one factor in a whole row usually took its mean over another width."""
    expected = truth.value
    usable = expected.abs() > 0
    ratio = torch.where(usable, output.norm_out.double() / expected, 1.0)
    row = ratio[(ratio - 1.0).abs().amax(1).argmax()] if ratio.numel() else ratio.reshape(-1)
    spread = float(row.max() - row.min()) if row.numel() else 1.0
    factor = float(row.median()) if row.numel() else 1.0
    if spread < 0.02 * abs(factor) and abs(factor - 1.0) > 0.002:
        width = factor**2 * inputs.residual.shape[1]
        return f"the whole row is {factor:.4g} times too large: the mean square was taken over {width:.0f} columns?"
    return ""


def fresh_copy(inputs: TailInputs, rank: int, device: str) -> TailInputs:
    """Rank ``rank``'s own copy, so that a backend that writes its inputs harms nobody else."""
    own = inputs.outputs[rank]
    copy = TailInputs(
        outputs=(copy_output(own),),
        residual=inputs.residual.clone(),
        norm_weight=inputs.norm_weight.clone(),
        eps=inputs.eps,
        weight_bias=inputs.weight_bias,
        quant=inputs.quant,
    )
    return copy if device == "cpu" else copy.to(torch.device(device))


LARGE_ROWS = 2**30
"""Elements of rows above which a copy is not affordable; such rows are lent as they are."""


def copy_output(output: MoEOutput) -> MoEOutput:
    """A copy whose tensors are its own."""
    return map_tensors(output, lambda tensor: tensor if tensor.numel() > LARGE_ROWS else clone(tensor))


def clone(tensor: Tensor) -> Tensor:
    """A copy with the same strides, so that a layout that a test made wrong stays wrong."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _one_call(tail: Tail, rank: int, number: int, call: TailInputs, before: BeforeCall | None) -> TailOutput:
    if before is not None:
        before(rank, number)
    output = tail(
        call.outputs[0], call.residual, call.norm_weight, eps=call.eps, weight_bias=call.weight_bias, quant=call.quant
    )
    # A tail may return its own buffers and write them again at the next call, so the results are copied now.
    return _snapshot(output)


def _snapshot(output: object) -> TailOutput:
    if not isinstance(output, TailOutput):
        return output  # type: ignore[return-value]  # named by checked_output, outside the rank's thread
    copies = {name: value.detach().clone() for name, value in vars(output).items() if isinstance(value, Tensor)}
    return replace(output, **copies)
