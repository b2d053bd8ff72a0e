"""Correct backends are never blamed: random legal cases through the reference, and the largest headroom."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_conformance.cases.case import LayerCase, TailCase
from moe_conformance.cases.strata import LATTICE_SCALES
from moe_conformance.direct import run_case
from moe_conformance.faults.catalogue import variants
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.suite import test_numerics
from moe_conformance.verdicts import Verdict
from moe_contract import Consumer, RoutingMethod
from moe_contract.discovery import load_consumer, load_producer

WANTED = int(os.environ.get("MOE_CONFORMANCE_RANDOM_CASES", "2000"))
"""Random cases in all; a nightly run asks for 20,000."""
TAIL_CASES, PAIR_CASES = WANTED * 3 // 20, WANTED // 12
"""Examples of each parametrisation, of which there are five of the one and three of the other."""
CONSUMERS = ("reference", "reference-a", "reference-b")
ORDERS = ("slots-in-reverse", "slots-in-pairs", "fused-multiply-add", "ranks-in-a-tree", "scale-on-each-weight",
          "rounds-at-each-rank-as-declared", "norm-in-a-tree")  # fmt: skip
"""Correct variants of the catalogue: other orders of the same sums."""
EXAMPLES = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True, "database": None}
DTYPES = st.sampled_from(["bfloat16", "float16"])
WEIGHTS = st.sampled_from(["activation", "float32"])


@st.composite
def tail_cases(draw: st.DrawFn, stratum: str) -> TailCase:
    """Any legal case of a consumer, small enough to take milliseconds."""
    scales = LATTICE_SCALES if stratum == "lattice" else (1.0, 1.5, 2.5, 2.827, 5.0)
    most_ranks = 8 if stratum == "lattice" else 4
    return TailCase(
        tokens=draw(st.integers(1, 9)),
        top_k=draw(st.integers(1, 22)),
        hidden_size=8 * draw(st.integers(32, 96)),
        ranks=draw(st.sampled_from([n for n in (1, 2, 3, 4, 8) if n <= most_ranks])),
        dtype=draw(DTYPES),
        stratum=stratum,
        weights_dtype=draw(WEIGHTS),
        absent=draw(st.sampled_from(["none", "quarter", "token", "all"])),
        scale=draw(st.sampled_from(scales)),
        shared=draw(st.booleans()),
        form=draw(st.sampled_from(["unfinalized", "unfinalized", "finalized"])),
        route_major=draw(st.booleans()),
        weight_bias=draw(st.sampled_from([0.0, 1.0])),
        norm_weight_dtype=draw(WEIGHTS),
        norm_weight=draw(st.sampled_from(["ones", "random"])),
        eps=draw(st.sampled_from([1e-6, 1e-5, 1e-2])),
        seed=draw(st.integers(0, 2**20)),
    )


@st.composite
def layer_cases(draw: st.DrawFn) -> LayerCase:
    """Any legal layer, small enough to take milliseconds."""
    method = draw(st.sampled_from([m for m in RoutingMethod if m is not RoutingMethod.LLAMA4]))
    grouped = method is RoutingMethod.DEEPSEEK_V3 and draw(st.booleans())
    ranks = draw(st.sampled_from([1, 2, 4]))
    return LayerCase(
        tokens=draw(st.integers(0, 5)),
        top_k=draw(st.integers(1, 6)),
        hidden_size=64 * draw(st.integers(2, 5)),
        ranks=ranks,
        dtype=draw(DTYPES),
        intermediate_size=16,
        num_experts=32 if grouped else draw(st.sampled_from([8, 12, 16])),
        num_groups=4 if grouped else 1,
        topk_groups=2 if grouped else 1,
        method=method,
        activation=draw(st.sampled_from(["silu", "gelu-tanh", "swiglu-oai", "relu2"])),
        ep=draw(st.sampled_from([n for n in (1, 2, 4) if ranks % n == 0])),
        scale=draw(st.sampled_from([1.0, 1.5, 2.5, 2.827])),
        shared_intermediate_size=draw(st.sampled_from([0, 16])),
        biases=draw(st.booleans()),
        skew=draw(st.booleans()),
        precomputed_weights=draw(WEIGHTS),
        weight_bias=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 2**20)),
    )


@pytest.mark.parametrize("stratum", ["lattice", "normal", "small", "cancelling", "dominant"])
def test_correct_tails_are_never_blamed(stratum: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Random legal cases of every stratum and rounding profile: no failure, and every headroom is at most 1."""
    largest = _Largest()

    @settings(max_examples=TAIL_CASES, **EXAMPLES)
    @given(tail_cases(stratum), st.sampled_from([*CONSUMERS, *ORDERS]))
    def check(case: TailCase, name: str) -> None:
        _judged(largest, test_numerics.test_tail_is_within_the_bound_of_its_profile, case, None, name)

    check()
    largest.report(capsys, f"{stratum} tails")


@pytest.mark.parametrize("name", CONSUMERS)
def test_correct_pairs_are_never_blamed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Random legal layers through reference producer and consumer: no failure, and every headroom is at most 1."""
    largest = _Largest()

    @settings(max_examples=PAIR_CASES, **EXAMPLES)
    @given(layer_cases(), st.sampled_from(["reference", "reference-route-major", "reference-folded"]))
    def check(case: LayerCase, producer: str) -> None:
        _judged(largest, test_numerics.test_layer_and_tail_together_are_within_the_bound, case, producer, name)

    check()
    largest.report(capsys, f"pairs with {name}")


@pytest.mark.parametrize("name", CONSUMERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_subnormal_values_are_no_fault(name: str, dtype: str) -> None:
    """Rows, shared outputs and residuals so small that every rounding underflows stay within the bounds."""
    case = TailCase(tokens=5, top_k=4, hidden_size=256, ranks=2, dtype=dtype, stratum="normal", shared=True, scale=2.5)
    tail = TailSubject(name, load_consumer(name), case, "NUM-1")
    least = torch.finfo(tail.inputs.residual.dtype).smallest_normal
    outputs = []
    for output in tail.inputs.outputs:
        assert not isinstance(output.routed, torch.Tensor) and output.shared_output is not None
        rows = replace(output.routed, gemm2_permuted=output.routed.gemm2_permuted * least)
        outputs.append(replace(output, routed=rows, shared_output=output.shared_output * least))
    small = replace(tail.inputs.with_outputs(outputs), residual=tail.inputs.residual * least)
    tail.judge(tail.run(small), small, controls=False)
    assert tail.headroom is not None and tail.headroom <= 1.0


class _Largest:
    """The largest headroom that was seen, by rounding profile too, and how many cases were judged."""

    def __init__(self) -> None:
        self.headroom, self.cases = 0.0, 0
        self.by_profile: dict[str, float] = {}

    def report(self, capsys: pytest.CaptureFixture[str], what: str) -> None:
        with capsys.disabled():
            profiles = ", ".join(f"{name} {value:.4f}" for name, value in sorted(self.by_profile.items()))
            print(f"\n{what}: {self.cases} cases, largest headroom {self.headroom:.3f} ({profiles})")
        assert self.headroom < 1.0


def _judged(largest: _Largest, function: Any, case: Any, producer: str | None, consumer: str) -> None:
    sides = (load_producer(producer) if producer else None, _consumer(consumer))
    result = run_case(function, case, *sides)
    # Where a case is too weak for its controls (a dropped expert within a worst-case bound) it says nothing.
    assert result.verdict in (Verdict.PASS, Verdict.VACUOUS, Verdict.UNSUPPORTED), f"{case.id}: {result.reason}"
    largest.cases += 1
    largest.headroom = max(largest.headroom, result.headroom or 0.0)
    profile = sides[1].declaration.profile.value
    largest.by_profile[profile] = max(largest.by_profile.get(profile, 0.0), result.headroom or 0.0)


@cache
def _consumer(name: str) -> Consumer:
    found = variants()[name].plant().consumer if name in ORDERS else load_consumer(name)
    assert found is not None
    return found
