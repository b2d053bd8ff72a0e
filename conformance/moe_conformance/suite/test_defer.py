"""DEFER: when a producer hands over an unfinalized output, and who may finish it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_conformance.cases.tail_data import move_output
from moe_conformance.declared_support import tail_unsupported
from moe_conformance.harness.threads import ThreadRankGroup
from moe_conformance.marks import clause, layers, pairs, several_ranks, several_tokens, tails
from moe_conformance.subjects.calls import judged_errors, on_every_rank
from moe_conformance.subjects.layer import LayerSubject, RoutedOutput, on_device
from moe_conformance.subjects.pair import PairSubject
from moe_conformance.subjects.tail import TailSubject, fresh_copy
from moe_conformance.suite.comparisons import require_same, require_within
from moe_conformance.suite.deferral import deferred, judge_rows
from moe_conformance.suite.refusals import refusal
from moe_conformance.truth import bounds
from moe_conformance.truth.bounds import EXACT
from moe_conformance.truth.layer_oracle import finalized_truth
from moe_conformance.truth.tail_oracle import local_part
from moe_conformance.verdicts import ClauseBrokenError
from moe_contract import MoEOutput, PendingOutputError, Violation, complete, finalize, is_unfinalized
from moe_contract.completion import require_tensor


@clause("DEFER-1")
@layers()
def test_deferral_needs_the_flag_and_a_reduction(layer: LayerSubject) -> None:
    """Unfinalized with the flag and tp_size > 1; finalized without either."""
    for defer in (False, True):
        config = layer.config(defer=defer)
        layer.require_contract(layer.run(config), config)


@clause("DEFER-1")
@layers({"tokens": 4}, where=several_ranks)
def test_cap_ends_deferral(layer: LayerSubject) -> None:
    """A batch at the cap defers, one token more finalizes."""
    for cap in (layer.case.tokens, layer.case.tokens - 1):
        config = layer.config(cap=cap)
        layer.require_contract(layer.run(config), config)


@clause("DEFER-1")
@layers({"method": "llama4", "top_k": 1}, where=several_ranks)
def test_input_weighted_routing_never_defers(layer: LayerSubject) -> None:
    """Routing that weights the expert's input finalizes, since its rows carry the weight (ROWS-3)."""
    layer.require_contract(layer.run())


@clause("DEFER-2")
@layers(where=several_ranks)
def test_flag_is_read_at_the_call(layer: LayerSubject) -> None:
    """The flag set after loading takes effect at the next call; cleared, it stops."""
    layer.require_support(deferral=True)
    config = layer.config(defer=False)
    part = on_device(layer.parts[0], layer.settings.device)

    def one_rank(group: ThreadRankGroup) -> list[RoutedOutput]:
        loaded = layer.producer.load(part, config)
        results = []
        for flag in (False, True, False):
            config.defer_moe_finalize = flag
            results.append(loaded(*layer.batch(layer.inputs)))
        return results

    results = on_every_rank(layer.name, layer.settings, 1, one_rank)[0]
    for call, (flag, output) in enumerate(zip((False, True, False), results, strict=True)):
        if is_unfinalized(output) != flag:
            got = "an unfinalized output" if is_unfinalized(output) else "a finalized output"
            expected = f"{'an unfinalized' if flag else 'a finalized'} output at call {call}, where the flag is {flag}"
            raise ClauseBrokenError([Violation(clause="DEFER-2", field="routed", got=got, expected=expected)])


@clause("DEFER-3")
# 320: a width that kernels pad to their tile of 128 or 256.
@layers({}, {"method": "deepseek-v3"}, {"method": "llama4", "top_k": 1}, {"hidden_size": 320}, where=several_ranks)
def test_deferral_is_as_declared(layer: LayerSubject) -> None:
    """What the declaration says of deferral is what happens: a kernel that cannot defer ignores the flag."""
    layer.require_support()
    outputs = layer.run()
    layer.require_form(outputs, layer.config())
    for rank, output in enumerate(outputs):
        if is_unfinalized(output) != layer.defers:
            got = "unfinalized" if is_unfinalized(output) else "finalized"
            verb = "defers" if layer.defers else "never defers"
            expected = f"declared: {verb} {layer.case.method.value} routing at H {layer.case.hidden_size}"
            raise ClauseBrokenError(
                [Violation(clause="DEFER-3", field="routed", got=got, expected=expected, rank=rank)]
            )


@clause("DEFER-4")
@pairs(where=several_ranks)
def test_deferral_is_negotiated(pair: PairSubject) -> None:
    """What negotiation grants, the consumer takes; what it denies, the producer finalizes."""
    pair.layer.require_support()
    negotiated = pair.negotiation()
    config = negotiated.config(pair.case.ranks, pair.case.ep)
    inputs = pair.hand_over(config)
    pending = [is_unfinalized(output.routed) for output in inputs.outputs]
    wanted = negotiated.deferred and pair.layer.defers
    if any(state != wanted for state in pending):
        expected = "unfinalized outputs" if wanted else f"finalized outputs: {'; '.join(negotiated.reasons)}"
        raise ClauseBrokenError(
            [Violation(clause="DEFER-4", field="routed", got=f"unfinalized: {pending}", expected=expected)]
        )
    if negotiated.deferred:
        _require_readable(pair)
        pair.tail.run(inputs)


@clause("DEFER-4")
@tails(where=several_tokens)
def test_call_beyond_the_negotiated_cap_is_refused(tail: TailSubject) -> None:
    """A call with more tokens than the tail was opened for is refused on every rank, before anything is done."""
    tail.require_support()
    inputs = tail.inputs
    small = inputs.capacity(tail.case.model_copy(update={"tokens": tail.case.tokens - 1}))

    def one_rank(group: ThreadRankGroup) -> tuple[bool, int]:
        opened = tail.consumer.open(group, small)
        collectives = len(group.trace)
        own = fresh_copy(inputs, group.rank, tail.settings.device)

        def call() -> None:
            with judged_errors(tail.name):
                opened(own.outputs[0], own.residual, own.norm_weight, eps=own.eps)

        refused = refusal(call) is not None
        opened.close()
        return refused, len(group.trace) - collectives

    for rank, (refused, collectives) in enumerate(on_every_rank(tail.name, tail.settings, tail.case.ranks, one_rank)):
        if not refused or collectives:
            got = f"a refusal after {collectives} collectives" if refused else "a result"
            expected = f"a refusal: {tail.case.tokens} tokens, capacity {tail.case.tokens - 1}"
            raise ClauseBrokenError(
                [Violation(clause="DEFER-4", field="capacity", got=got, expected=expected, rank=rank)]
            )


@clause("DEFER-5")
@layers(
    {},
    {"method": "deepseek-v3", "scale": 2.5},
    {"method": "default", "ep": 2},
    {"activation": "relu2", "stratum": "lattice"},
    where=several_ranks,
)
def test_deferred_equals_finalized(layer: LayerSubject) -> None:
    """Finalizing a deferred output gives the same kernel's finalized output within the bound of both."""
    off = layer.config(defer=False)
    pending, whole = deferred(layer), layer.run(off)
    judge_rows(layer, pending)
    layer.require_form(whole, off)
    for rank, (triple, tensor) in enumerate(zip(pending, whole, strict=True)):
        if not isinstance(tensor, Tensor):
            expected = "a finalized tensor: the flag is off"
            raise ClauseBrokenError([Violation(clause="DEFER-1", field="routed", got="unfinalized", expected=expected)])
        # Each path may be off by the bound of one; what both have wrong alike is no difference between them.
        _, bound = finalized_truth(layer.truth(rank), tensor.dtype)
        completed = finalize(triple).cpu().double()
        require_within(tensor, completed, 2 * bound, clause="DEFER-5", field="routed", rank=rank, layer=layer)


@clause("DEFER-6")
@layers({}, {"shared_intermediate_size": 32, "method": "deepseek-v3", "scale": 2.5}, where=several_ranks)
def test_any_holder_can_complete_a_pending_output(layer: LayerSubject) -> None:
    """Completing the layer's pending outputs equals letting the layer reduce its own."""
    layer.require_support()
    layer.require_contract(layer.run())

    def one_rank(group: ThreadRankGroup) -> tuple[MoEOutput | Tensor, Tensor]:
        output = layer.forward(group, layer.config(), reduce_results=False)
        assert not isinstance(output, Tensor)
        return output, complete(output, group)

    both = on_every_rank(layer.name, layer.settings, layer.case.ranks, one_rank)
    reduced = layer.run_forward(layer.config(), reduce_results=True)
    for rank, ((_, completed), own) in enumerate(zip(both, reduced, strict=True)):
        require_same(require_tensor(own).cpu(), completed.cpu(), "DEFER-6", "output", "who completes it", rank)
    _judge_completed([output for output, _ in both], both[0][1], layer)


@clause("DEFER-6")
@layers(where=several_ranks)
def test_pending_output_is_not_taken_for_a_tensor(layer: LayerSubject) -> None:
    """Code that handles only tensors gets a clear error when it is handed a pending output."""
    layer.require_support(deferral=True)
    pending = layer.run_forward(layer.config())[0]
    assert not isinstance(pending, Tensor)
    uses: dict[str, Callable[[], object]] = {
        "require_tensor": lambda: require_tensor(pending),
        "add": lambda: torch.zeros(1) + pending,
    }
    for name, use in uses.items():
        try:
            use()
        except PendingOutputError as error:
            if "complete" in str(error):
                continue
        expected = "PendingOutputError that names moe_contract.complete"
        raise ClauseBrokenError([Violation(clause="DEFER-6", field=name, got="no clear error", expected=expected)])


def _require_readable(pair: PairSubject) -> None:
    """What deferral was granted for is what the consumer declares to read. Its norm weight was not asked about."""
    declared, case = pair.consumer.declaration, pair.tail.case
    readable = case.model_copy(update={"norm_weight_dtype": sorted(declared.norm_weight_dtypes)[0]})
    reason = tail_unsupported(declared, readable, pair.settings.device)
    if reason is not None:
        found = Violation(clause="DEFER-4", field="routed", got="deferral granted", expected=f"denied: {reason}")
        raise ClauseBrokenError([found])


def _judge_completed(outputs: list[MoEOutput | Tensor], completed: Tensor, layer: LayerSubject) -> None:
    """The completed sum against the exact one; ``complete`` rounds like profile B."""
    dtype = completed.dtype
    cpu = torch.device("cpu")
    parts = [local_part(move_output(output, cpu)) for output in outputs if not isinstance(output, Tensor)]
    total = torch.zeros(completed.shape, dtype=EXACT)
    errors, magnitude = torch.zeros_like(total), torch.zeros_like(total)
    for part in parts:
        own = bounds.store(part.value, (part.roundings + 1) * bounds.U32 * part.magnitude, dtype)
        total, errors, magnitude = total + part.value, errors + own, magnitude + part.value.abs() + own
    bound = errors + bounds.growth(len(parts), dtype) * magnitude + bounds.ETA[dtype] * len(parts)
    require_within(completed, total, bound, clause="DEFER-6", field="routed (completed)", rank=0, layer=layer)
