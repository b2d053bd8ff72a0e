"""Acceptance rules in public use, run on the same faults: what each would have noticed.

Each rule is one comparison of a result with its reference, on everyday data of two scales, as kernels' own tests have
it. The numbers are those of the projects' tests; the suite itself uses none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_conformance.cases.case import LayerCase, Stratum, TailCase
from moe_conformance.cases.layer_data import LayerInputs, make_layer_inputs, make_parts
from moe_conformance.cases.tail_data import TailInputs, make_tail_inputs
from moe_conformance.faults.bases import base_consumer, base_producer
from moe_conformance.faults.model import Fault, Planted, Variant
from moe_conformance.faults.results import RuleResult
from moe_conformance.harness.threads import ThreadRankGroup, run_ranks
from moe_conformance.subjects.tail import fresh_copy
from moe_conformance.truth.tail_oracle import residual_truth
from moe_contract import Consumer, MoEConfig, MoEOutput, Producer, RoutingMethod, TailCapacity

TIMEOUT_S = 10.0
SMALL = 0.02
"""Factor of the small data, the usual scale of initialised weights."""
SCALES = (1.0, SMALL)
TOP_K, RANKS = 8, 2
SHAPE: dict[str, Any] = {"tokens": 33, "top_k": TOP_K, "ranks": RANKS, "dtype": "bfloat16"}
"""A batch of ordinary size, large enough for ratios of matching elements to mean something."""


Result = tuple[Tensor, Tensor]
"""``residual_out`` and ``norm_out`` of one rank."""


@dataclass(frozen=True)
class Compared:
    """A result beside others of the same ``[T, H]``, all float64."""

    got: Tensor
    expected: Tensor
    """What the correct backend gives, in its 16 bits: the most favourable reference that a rule can have."""
    exact: Tensor
    eager: Tensor
    """What plain 16-bit arithmetic gives."""


def _close(compared: Compared, rtol: float, atol: float) -> Tensor:
    return (compared.got - compared.expected).abs() <= atol + rtol * compared.expected.abs()


def _ratio(rtol: float, atol: float, least: float) -> Callable[[Compared], bool]:
    return lambda compared: float(_close(compared, rtol, atol).double().mean()) >= least


def _everywhere(rtol: float, atol: float) -> Callable[[Compared], bool]:
    return lambda compared: bool(_close(compared, rtol, atol).all())


def _cosine_like(most: float) -> Callable[[Compared], bool]:
    def accepts(compared: Compared) -> bool:
        x, y = compared.got, compared.expected
        similarity = float(2 * (x * y).sum() / (x.square() + y.square()).sum())
        return 1.0 - similarity < most  # which NaN is not

    return accepts


def _twice_the_eager_error(compared: Compared) -> bool:
    error, allowed = (compared.got - compared.exact).abs().max(), (compared.eager - compared.exact).abs().max()
    return bool(error <= 2.0 * allowed)


RULES: dict[str, Callable[[Compared], bool]] = {
    "ratio of matched elements (92.5 %, rtol 0.85, atol 0.1)": _ratio(0.85, 0.1, 0.925),
    "ratio 95 %, rtol = atol = 1e-2": _ratio(1e-2, 1e-2, 0.95),
    "cosine-like difference < 1e-3": _cosine_like(1e-3),
    "cosine-like difference < 1e-5": _cosine_like(1e-5),
    "rtol = atol = 0.2": _everywhere(0.2, 0.2),
    "at most twice the eager error": _twice_the_eager_error,
    "rtol = atol = 1e-2 everywhere": _everywhere(1e-2, 1e-2),
    "torch.testing default for bfloat16 (1.6e-2, 1e-5)": _everywhere(1.6e-2, 1e-5),
}
"""Rule: whether it accepts."""


def apply_rules(fault: Fault | Variant) -> dict[str, RuleResult]:
    """What every rule makes of a fault. One that does not get as far as a result is noticed by all of them."""
    planted = fault.plant()
    with planted.applied():
        outcomes = [_rejected(planted, scale) for scale in SCALES]
    return {rule: RuleResult(normal=outcomes[0][rule], small=outcomes[1][rule]) for rule in RULES}


def _rejected(planted: Planted, scale: float) -> dict[str, bool]:
    try:
        compared = list(_layer(planted, scale) if planted.consumer is None else _tail(planted.consumer, scale))
    except Exception:  # a fault may raise anything; whoever runs a test sees that
        return dict.fromkeys(RULES, True)
    return {rule: not all(accepts(one) for one in compared) for rule, accepts in RULES.items()}


def _tail(consumer: Consumer, scale: float) -> Iterator[Compared]:
    """Residual and norm of a tail against the exact ones."""
    inputs = _tail_inputs(scale)
    yield from _compared(_finish(consumer, inputs), inputs)


def _compared(got: list[Result], inputs: TailInputs) -> Iterator[Compared]:
    """Each rank's residual and norm beside those of the correct tail on ``inputs``."""
    exact = residual_truth(inputs, base_consumer().declaration).value
    root = torch.rsqrt(exact.square().mean(1, keepdim=True) + inputs.eps)
    truths = (exact, exact * root * inputs.norm_weight.double())
    expected, eager = _finish(base_consumer(), inputs), _finish(base_consumer("reference-a"), inputs)
    for rank, result in enumerate(got):
        for one, right, truth, plain in zip(result, expected[rank], truths, eager[rank], strict=True):
            yield Compared(one.double(), right.double(), truth, plain.double())


@cache
def _tail_inputs(scale: float) -> TailInputs:
    stratum: Stratum = "normal" if scale == 1.0 else "small"
    case = TailCase(**SHAPE, hidden_size=1024, stratum=stratum, absent="quarter", scale=2.5, shared=True,
                    norm_weight="random")  # fmt: skip
    return make_tail_inputs(case)


def _layer(planted: Planted, scale: float) -> Iterator[Compared]:
    """Residual and norm of a layer through the reference tail, against those of the correct producer."""
    handed = _hand_over(planted.producer or base_producer(), _layer_inputs(scale))
    yield from _compared(_finish(base_consumer(), handed), _right_layer(scale))


LAYER = LayerCase(
    **{**SHAPE, "tokens": 17},
    hidden_size=512,
    num_experts=16,
    intermediate_size=32,
    ep=2,
    method=RoutingMethod.DEEPSEEK_V3,
    scale=2.5,
    shared_intermediate_size=32,
)
"""A layer with a shared expert, a scale and two expert-parallel halves."""


@cache
def _layer_inputs(scale: float) -> LayerInputs:
    inputs = make_layer_inputs(LAYER)
    return replace(inputs, hidden_states=inputs.hidden_states * scale, residual=inputs.residual * scale)


@cache
def _right_layer(scale: float) -> TailInputs:
    return _hand_over(base_producer(), _layer_inputs(scale))


def _hand_over(producer: Producer, inputs: LayerInputs) -> TailInputs:
    from moe_conformance.subjects import layer as engine  # its MoEForward may be a planted one

    parts = make_parts(LAYER)
    config = MoEConfig(defer_moe_finalize=True, tp_size=LAYER.ranks, ep_size=LAYER.ep)

    def one_rank(group: ThreadRankGroup) -> MoEOutput:
        forward = engine.MoEForward(producer, parts[group.rank], config, group)  # type: ignore[attr-defined]  # not exported
        logits = inputs.router_logits
        assert isinstance(logits, Tensor)
        output = forward(inputs.hidden_states.clone(), logits.clone())
        assert isinstance(output, MoEOutput)
        return output

    outputs = run_ranks(one_rank, LAYER.ranks, timeout_s=TIMEOUT_S)
    return TailInputs(tuple(outputs), inputs.residual, inputs.norm_weight, eps=1e-6)


def _finish(consumer: Consumer, inputs: TailInputs) -> list[Result]:
    tokens, hidden = inputs.residual.shape
    capacity = TailCapacity(tokens, hidden, TOP_K, torch.bfloat16)

    def one_rank(group: ThreadRankGroup) -> tuple[Tensor, Tensor]:
        own = fresh_copy(inputs, group.rank, "cpu")
        tail = consumer.open(group, capacity)
        result = tail(own.outputs[0], own.residual, own.norm_weight, eps=own.eps)
        tail.close()
        return result.residual_out.clone(), result.norm_out.clone()

    return run_ranks(one_rank, len(inputs.outputs), timeout_s=TIMEOUT_S)
