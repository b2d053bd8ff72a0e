"""QUANT: the quantised outputs."""

from __future__ import annotations

from moe_conformance.marks import clause, tails
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.truth.quant_oracle import quant_violation
from moe_conformance.verdicts import ClauseBrokenError


@clause("QUANT-1")
@tails(
    {"quant": "fp8-static", "stratum": "normal"},
    {"quant": "fp8-per-token", "stratum": "normal"},
    {"quant": "fp8-per-token", "stratum": "small", "weight_bias": 1.0, "norm_weight": "random"},
    {"quant": "nvfp4", "stratum": "normal"},
    {"quant": "nvfp4", "stratum": "normal", "scale_layout": "linear"},
    {"quant": "nvfp4", "stratum": "normal", "tokens": 130, "hidden_size": 1056, "top_k": 2},
)
def test_bytes_and_scales_follow_the_recipe(tail: TailSubject) -> None:
    """Codes, scales, their layout and the padding bytes are those of the recipe, applied to the returned norm."""
    recipe = tail.inputs.quant
    assert recipe is not None
    outputs = tail.run()
    for rank, output in enumerate(outputs):
        violation = quant_violation(output, recipe, rank)
        if violation is not None:
            raise ClauseBrokenError([violation])
    tail.judge(outputs)
