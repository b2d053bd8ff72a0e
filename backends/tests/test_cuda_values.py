"""The CUDA consumer on a GPU: bits of the profile C emulation, for real layer shapes, dtypes, ranks and forms."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_backends.cuda import CudaConsumer, Form
from moe_backends.reference.quantize import quantize
from moe_contract import QuantFormat, QuantRecipe, TailCapacity

from .cuda_ranks import GPU, Call, Ranks, random_call, same_bits, ulps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CLUSTER, PAIR, ALONE = Form(blocks=4), Form(blocks=2), Form(blocks=1)
BLOCK, TWO_SHOT = Form(vectors=2), Form(vectors=4, two_shot=True)
SHAPES = [
    (7168, 8), (4096, 6), (5120, 6), (3584, 16), (2304, 8), (5120, 1), (2048, 10), (6144, 4), (2688, 6), (1024, 22),
    (3072, 8), (2880, 4), (8192, 2), (256, 3), (8, 2), (16384, 32), (1032, 5),
]  # fmt: skip
"""(H, K) of the layers in models.toml, and the edges: the smallest and the largest H, K of 1 and 32."""


def check(call: Call, ranks: int, top_k: int, form: Form | None = None) -> None:
    """One call: residual bits, norm within one unit in the last place, ranks alike, quantised bytes by the recipe."""
    tokens, hidden = call.residual.shape
    forms = None if form is None else (form,) if form.loops else (form, Form())  # where not all tokens are resident
    opened = Ranks(
        CudaConsumer(forms=forms, timeout_s=2.0), ranks,
        TailCapacity(max(1, tokens), hidden, top_k, call.residual.dtype),
    )  # fmt: skip
    if form is not None and (tokens <= 4 or ranks == 1):
        assert opened.tails[0].engine.configs[0].max_tokens >= tokens, "the form under test is not the one that runs"
    found = opened(call)
    opened.close()
    residual, norm = call.expected()
    for output in found:
        assert same_bits(output.residual_out, residual)
        assert ulps(output.norm_out, norm) <= 1
        assert same_bits(output.norm_out, found[0].norm_out)
        if call.quant is not None:
            codes, scales = quantize(output.norm_out, call.quant)
            assert output.quant_out is not None and output.quant_scale is not None
            assert same_bits(output.quant_out, codes)
            assert same_bits(output.quant_scale, scales)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("hidden", "top_k"), SHAPES)
def test_residual_has_the_bits_of_the_emulation(ranks: int, hidden: int, top_k: int) -> None:
    """Every layer shape, all forms, at sizes of one and of several waves."""
    cases = [(CLUSTER, 1), (CLUSTER, 129), (PAIR, 1), (PAIR, 33), (ALONE, 1), (ALONE, 16), (ALONE, 300)]
    cases += [(BLOCK, 5), (BLOCK, 300), (None, 17)]
    for form, tokens in cases:
        if form is None or form.fits(hidden):
            check(random_call(tokens + hidden, ranks, tokens, hidden, top_k), ranks, top_k, form)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights_dtype", [None, torch.float32])
@pytest.mark.parametrize("norm_dtype", [None, torch.float32])
def test_every_dtype_pair(dtype: torch.dtype, weights_dtype: Any, norm_dtype: Any) -> None:
    """Activation, weights and norm weight dtypes in every combination, with the (1 + gamma) form."""
    forms = ((1, CLUSTER), (1, ALONE), (1, BLOCK), (2, CLUSTER), (2, PAIR), (2, ALONE), (2, BLOCK), (2, TWO_SHOT))
    for ranks, form in forms:
        call = random_call(
            1, ranks, 33, 2880, 6, dtype, weights_dtype=weights_dtype, norm_dtype=norm_dtype, weight_bias=1.0
        )
        check(call, ranks, 6, form)


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_two_shot_has_the_bits_of_one_shot(ranks: int) -> None:
    """Reduced by one owner or by every rank: the same sums in the same order."""
    for tokens in (1, 3, 64, 257):
        check(random_call(tokens, ranks, tokens, 2688, 6), ranks, 6, TWO_SHOT)


def test_sixteen_ranks() -> None:
    """The largest group, in both forms."""
    for form, tokens in ((CLUSTER, 2), (ALONE, 4), (BLOCK, 40), (None, 40)):
        check(random_call(7, 16, tokens, 7168, 8), 16, 8, form)


@pytest.mark.parametrize("options", [
    {"finalized": True}, {"route_major": True}, {"shared": False}, {"absent": 1.0}, {"absent": 0.0, "scale": 1.0},
])  # fmt: skip
def test_every_form_of_input(options: dict[str, Any]) -> None:
    """Finalized, route-major, without a shared output, with every slot absent, with none absent."""
    for ranks in (1, 2):
        for form in (CLUSTER, PAIR, ALONE, BLOCK):
            check(random_call(3, ranks, 33, 4096, 8, **options), ranks, 8, form)


@pytest.mark.parametrize("recipe", [
    QuantRecipe(QuantFormat.FP8_STATIC, scale=8 / 448),
    QuantRecipe(QuantFormat.FP8_PER_TOKEN),
    QuantRecipe(QuantFormat.NVFP4, global_scale=336.0, scale_layout="linear"),
    QuantRecipe(QuantFormat.NVFP4, global_scale=336.0),
], ids=["fp8-static", "fp8-per-token", "nvfp4-linear", "nvfp4-swizzled"])  # fmt: skip
@pytest.mark.parametrize("hidden", [7168, 2880, 1056])
def test_quantised_bytes_follow_the_recipe(recipe: QuantRecipe, hidden: int) -> None:
    """Codes, scales and padding, for whole and for part tiles of scales."""
    for ranks, form, tokens in (
        (1, CLUSTER, 3), (1, ALONE, 130), (1, BLOCK, 130), (2, CLUSTER, 33), (2, ALONE, 33), (2, BLOCK, 257),
        (4, PAIR, 4), (4, TWO_SHOT, 9),
    ):  # fmt: skip
        check(random_call(5, ranks, tokens, hidden, 4, quant=recipe), ranks, 4, form)


def test_no_value_looks_like_an_armed_slot() -> None:
    """All 65,536 bit patterns, NaNs with every payload included, pass through an exchange: NaN stays NaN."""
    for dtype in (torch.bfloat16, torch.float16):
        patterns = torch.arange(65536, device=GPU).to(torch.uint16).view(dtype).view(16, 4096)
        call = random_call(9, 2, 16, 4096, 1, dtype, finalized=True, shared=False, scale=1.0)
        for output in call.outputs:
            output.routed.copy_(patterns)  # type: ignore[union-attr]  # finalized
        for form in (CLUSTER, ALONE, BLOCK, TWO_SHOT):
            opened = Ranks(CudaConsumer(forms=(form,), timeout_s=2.0), 2, TailCapacity(16, 4096, 1, dtype))
            found = opened(call)
            opened.close()
            expected = call.expected()[0]
            assert torch.equal(found[0].residual_out.isnan(), expected.isnan())
            assert torch.equal(found[0].residual_out.nan_to_num(), expected.nan_to_num())
            assert same_bits(found[0].residual_out, found[1].residual_out)


def test_rows_past_two_to_the_31_elements() -> None:
    """Row 299,594 of H 7168 lies past 2^31 elements (MAP-6)."""
    hidden, top_k = 7168, 2
    rows = torch.zeros(299_700, hidden, dtype=torch.bfloat16, device=GPU)
    for ranks, form in ((1, CLUSTER), (1, BLOCK), (2, BLOCK)):
        call = random_call(4, ranks, 2, hidden, top_k, absent=0.0)
        for rank, output in enumerate(call.outputs):
            triple = output.routed
            small = triple.gemm2_permuted[triple.expanded_idx_to_permuted_idx.view(-1).long()]  # type: ignore[union-attr]
            at = torch.tensor([[0, 299_699 - 7 * rank], [299_593, 299_594 - 7 * rank]], device=GPU)
            rows[at.view(-1)] = small
            call.outputs[rank] = type(output)(
                type(triple)(rows.clone() if rank else rows, triple.expert_weights, at.int()),  # type: ignore[call-arg, union-attr]
                output.shared_output, output.routed_scaling_factor,
            )  # fmt: skip
        check(call, ranks, top_k, form)


def test_a_call_longer_than_its_slots_takes_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 100 token slots, 250 tokens take three launches; scales of the last tile included."""
    monkeypatch.setattr("moe_backends.cuda.workspace.MAX_SLOT_TOKENS", 100)
    recipe = QuantRecipe(QuantFormat.NVFP4, global_scale=336.0)
    for ranks in (2, 4):
        check(random_call(6, ranks, 250, 1024, 4, quant=recipe), ranks, 4)
