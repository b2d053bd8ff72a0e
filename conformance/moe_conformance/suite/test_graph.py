"""GRAPH: capture in a CUDA graph, and torch.compile."""

from __future__ import annotations

import torch

from moe_conformance.cases.case import TailCase
from moe_conformance.cases.tail_data import TailInputs, make_tail_inputs
from moe_conformance.harness.threads import ThreadRankGroup
from moe_conformance.marks import clause, tails
from moe_conformance.subjects.calls import on_every_rank
from moe_conformance.subjects.tail import TailSubject, fresh_copy
from moe_conformance.suite.comparisons import blamed_on, require_same
from moe_conformance.verdicts import ClauseBrokenError, UnsupportedCaseError
from moe_contract import TailOutput

REPLAYS = 3
"""Replays with other inputs in the captured buffers; the first could still read what capture left behind."""


def _alone(case: TailCase) -> bool:
    return case.ranks == 1


@clause("GRAPH-1")
# No slot is absent: how many are would differ from batch to batch, and so would the size of the captured buffers.
@tails({"stratum": "normal", "shared": True, "scale": 2.5}, where=_alone)
def test_graph_replay_equals_eager(tail: TailSubject) -> None:
    """Captured once and replayed over new inputs, a call gives the bits of an eager call."""
    tail.require_support()
    if tail.settings.device != "cuda":
        raise UnsupportedCaseError("a CUDA graph needs a CUDA device; this run is on the CPU")
    if not tail.declaration.graph_capturable:
        raise UnsupportedCaseError(f"{tail.name} declares that it cannot be captured")
    cases = [tail.case.model_copy(update={"seed": tail.case.seed + n}) for n in range(REPLAYS)]
    batches = [make_tail_inputs(case) for case in cases]
    eager = [tail.run(inputs)[0] for inputs in batches]

    def one_rank(group: ThreadRankGroup) -> list[TailOutput]:
        opened = tail.consumer.open(group, batches[0].capacity(tail.case))
        static = fresh_copy(batches[0], 0, "cuda")

        def call() -> TailOutput:
            return opened(static.outputs[0], static.residual, static.norm_weight, eps=static.eps)

        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        results = []
        for inputs in batches:
            copy_into(static, fresh_copy(inputs, 0, "cuda"))
            graph.replay()
            torch.cuda.synchronize()
            results.append(TailOutput(captured.residual_out.cpu(), captured.norm_out.cpu()))
        opened.close()
        return results

    for number, replayed in enumerate(on_every_rank(tail.name, tail.settings, 1, one_rank)[0]):
        for field in ("residual_out", "norm_out"):
            a, b = getattr(eager[number], field), getattr(replayed, field)
            require_same(a, b, "GRAPH-1", field, f"replay {number} instead of an eager call", 0)


@clause("GRAPH-2")
@tails({"shared": True, "scale": 2.5, "absent": "quarter"}, where=_alone)
def test_compiled_call_gives_the_same_numbers(tail: TailSubject) -> None:
    """Under torch.compile(fullgraph=True) a call at one rank is within the same bound."""
    tail.require_support()
    if not tail.declaration.compilable:
        raise UnsupportedCaseError(f"{tail.name} does not declare that torch.compile can trace it")
    inputs = tail.inputs

    def one_rank(group: ThreadRankGroup) -> TailOutput:
        opened = tail.consumer.open(group, inputs.capacity(tail.case))
        own = fresh_copy(inputs, 0, tail.settings.device)
        # The eager backend traces as every other does and compiles nothing, which on a CPU takes a C++ compiler.
        compiled = torch.compile(opened, fullgraph=True, backend="eager")
        result: TailOutput = compiled(own.outputs[0], own.residual, own.norm_weight, eps=own.eps)
        return TailOutput(result.residual_out.cpu(), result.norm_out.cpu())

    try:
        tail.judge(on_every_rank(tail.name, tail.settings, 1, one_rank))
    except ClauseBrokenError as error:
        tail.judge(tail.run())
        raise blamed_on(error, "GRAPH-2", "wrong when compiled, and right when not") from error


def copy_into(static: TailInputs, fresh: TailInputs) -> None:
    """Writes a batch into the buffers that a graph was captured over."""
    for name in ("residual", "norm_weight"):
        getattr(static, name).copy_(getattr(fresh, name))
    old, new = static.outputs[0], fresh.outputs[0]
    assert old.shared_output is not None and new.shared_output is not None
    for name in ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx"):
        getattr(old.routed, name).copy_(getattr(new.routed, name))
    old.shared_output.copy_(new.shared_output)
