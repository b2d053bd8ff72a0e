"""SHARED: the shared expert's output."""

from __future__ import annotations

from torch import Tensor

from moe_conformance.marks import clause, layers, several_ranks, tails
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.suite.comparisons import require_within
from moe_conformance.truth.bounds import EXACT
from moe_conformance.truth.layer_oracle import mlp
from moe_conformance.verdicts import ClauseBrokenError
from moe_contract import Violation

WITH_SHARED = {"shared_intermediate_size": 32}


@clause("SHARED-1")
@layers(WITH_SHARED, {**WITH_SHARED, "method": "deepseek-v3", "scale": 2.5}, where=several_ranks)
def test_layer_hands_over_each_ranks_own_partial(layer: LayerSubject) -> None:
    """The shared output around a producer is the rank's partial: not reduced, not replicated, not scaled."""
    outputs = layer.run_forward(layer.config())
    tokens = layer.inputs.hidden_states.to(EXACT)
    for rank, output in enumerate(outputs):
        part = layer.parts[rank]
        assert part.shared is not None and not isinstance(output, Tensor)
        batch = tokens.unsqueeze(0)
        truth = mlp(part.shared, part.activation, batch, part.dtype, layer.declaration.intermediate_dtype)
        expected, bound = (tensor.squeeze(0) for tensor in truth)
        shared = output.shared_output
        if shared is None or shared.shape != expected.shape:
            got = "None" if shared is None else str(list(shared.shape))
            raise ClauseBrokenError([_violation(got, f"this rank's partial {list(expected.shape)}", rank)])
        require_within(shared, expected, bound, clause="SHARED-1", field="shared_output", rank=rank, layer=layer)


@clause("SHARED-1")
@tails({"shared": True}, {"shared": True, "form": "finalized"})
def test_consumer_adds_the_shared_output_once(tail: TailSubject) -> None:
    """Every rank's partial is added once, before the reduction."""
    tail.judge_residual(tail.run())


@clause("SHARED-2")
@tails({"shared": True, "scale": 2.5}, {"shared": True, "scale": 2.827, "stratum": "normal"})
def test_shared_output_is_not_multiplied(tail: TailSubject) -> None:
    """Neither the routed scale nor a routing weight touches the shared output."""
    tail.judge_residual(tail.run())


def _violation(got: str, expected: str, rank: int) -> Violation:
    return Violation(clause="SHARED-1", field="shared_output", got=got, expected=expected, rank=rank)
