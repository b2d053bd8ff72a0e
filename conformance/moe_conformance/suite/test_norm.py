"""NORM: the RMSNorm behind the residual."""

from __future__ import annotations

from dataclasses import replace

from moe_conformance.marks import clause, tails
from moe_conformance.subjects.tail import TailSubject


@clause("NORM-1")
@tails(
    {"stratum": "normal"},
    {"stratum": "normal", "norm_weight": "random"},
    {"stratum": "normal", "norm_weight": "random", "norm_weight_dtype": "float32"},
    {"stratum": "normal", "norm_weight": "random", "eps": 1e-2},
)
def test_norm_is_of_the_rounded_residual(tail: TailSubject) -> None:
    """Float32 mean square of the rounded residual over the logical H, eps in the root, gamma after, in its dtype."""
    tail.judge_norm(tail.run())


@clause("NORM-1")
@tails({"stratum": "small"})
def test_eps_is_inside_the_root(tail: TailSubject) -> None:
    """With a mean square near eps, adding it outside the root or leaving it out shows."""
    inputs = replace(tail.inputs, eps=float(tail.inputs.residual.float().square().mean()))
    tail.judge_norm(tail.run(inputs), inputs)


@clause("NORM-2")
@tails(
    {"stratum": "normal", "norm_weight": "random", "weight_bias": 1.0},
    {"stratum": "normal", "norm_weight": "random", "weight_bias": 1.0, "norm_weight_dtype": "float32"},
)
def test_weight_bias_gives_the_one_plus_gamma_form(tail: TailSubject) -> None:
    """weight_bias is added to gamma before it multiplies."""
    tail.judge_norm(tail.run())
