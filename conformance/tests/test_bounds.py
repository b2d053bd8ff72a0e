"""The derived bounds hold where rounding is at its worst."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from moe_conformance.cases import LayerCase, TailCase
from moe_conformance.judge import judge
from moe_conformance.oracle import residual_truth
from moe_conformance.suite.steps import require_within
from moe_conformance.support import layer_unsupported
from moe_conformance.tail_data import make_tail_inputs
from moe_conformance.verdicts import ClauseBrokenError
from moe_contract import MoEOutput, RoundingProfile, TailCapacity, UnfinalizedMoEOutput
from moe_contract.discovery import load_consumer, load_producer


@pytest.mark.parametrize("scale", [1.0, 2.827, 5.0])
def test_underflow_before_a_scale_is_within_the_bound(scale: float) -> None:
    """Products that underflow float16 lose up to eta each, and the scale enlarges what they lost."""
    case = TailCase(tokens=1, top_k=8, hidden_size=16, ranks=1, dtype="float16")
    inputs = make_tail_inputs(case)
    rows = torch.full((8, 16), 2.0**-13, dtype=torch.float16)
    weights = torch.full((1, 8), 0.999 * 2.0**-12, dtype=torch.float16)
    index = torch.arange(8, dtype=torch.int32).view(1, 8)
    output = MoEOutput(UnfinalizedMoEOutput(rows, weights, index), None, scale)
    inputs = replace(inputs, outputs=(output,), residual=torch.zeros(1, 16, dtype=torch.float16))
    consumer = load_consumer("reference-a")
    assert consumer.declaration.profile is RoundingProfile.STEP_ROUNDED
    group = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"), timeout_s=1.0)
    tail = consumer.open(group, TailCapacity(1, 16, 8, torch.float16))
    got = tail(output, inputs.residual, inputs.norm_weight, eps=1e-6).residual_out
    judgement = judge(got, residual_truth(inputs, consumer.declaration), exact=False)
    assert 0.0 < judgement.headroom <= 1.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, 1.5])
def test_value_out_of_its_bound_is_refused(wrong: float) -> None:
    """NaN is within no bound, though it compares as not larger than 1."""
    layer = SimpleNamespace(record=lambda headroom: None)
    result = torch.ones(2, 3)
    value, bound = result.double(), torch.full((2, 3), 0.25, dtype=torch.float64)
    require_within(result, value, bound, clause="OUT-1", field="routed", rank=0, layer=layer)
    result[1, 2] = wrong
    with pytest.raises(ClauseBrokenError) as caught:
        require_within(result, value, bound, clause="OUT-1", field="routed", rank=0, layer=layer)
    (found,) = caught.value.violations
    assert (found.token, found.column, found.count) == (1, 2, 1)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"ranks": 3}, "intermediate size 32"),
        ({"ranks": 3, "ep": 2}, "expert-parallel"),
        ({"ranks": 64}, "64 tensor-parallel ranks"),
        ({"ranks": 4, "shared_intermediate_size": 30}, "shared expert"),
    ],
)
def test_layer_that_cannot_be_split_is_unsupported(fields: dict[str, int], word: str) -> None:
    """Sizes that the ranks do not divide are a reason not to run, not a crash."""
    sizes = {"tokens": 2, "top_k": 2, "hidden_size": 64, "dtype": "bfloat16", "num_experts": 16}
    case = LayerCase(**{**sizes, "intermediate_size": 32, **fields})
    reason = layer_unsupported(load_producer("reference").declaration, case, "cpu")
    assert reason is not None and word in reason
