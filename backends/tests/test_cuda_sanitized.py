"""A small run of the CUDA consumer for run_sanitizers.py: NVIDIA's tools make it 10 to 50 times slower."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_backends.cuda import CudaConsumer, Form
from moe_backends.reference.local_sum import local_sum
from moe_backends.reference.quantize import quantize
from moe_contract import QuantFormat, QuantRecipe, RoundingProfile, TailCapacity, TailOutput

from .cuda_ranks import GPU, Call, Ranks, capture, random_call, same_bits
from .thread_group import ThreadGroup, thread_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

TOKENS, HIDDEN, TOP_K = 3, 1056, 5
"""Few tokens, and 132 vectors of 16 bytes: no multiple of a warp, so that some lanes have nothing to do; H is a
multiple of 16 for NVFP4; K is above the four rows that the pipe asks for at once."""
CAPACITY = TailCapacity(8, HIDDEN, TOP_K, torch.bfloat16)
WAIT_S = 20.0
"""A tool that runs the kernels of two streams one after the other ends in a PeerTimeoutError, not in a hang."""
FORMS = {"block": Form(vectors=2), "wide block": Form(vectors=4), "pair": Form(blocks=2), "cluster": Form(blocks=4)}
RECIPES = {
    "plain": None,
    "fp8": QuantRecipe(QuantFormat.FP8_PER_TOKEN),
    "nvfp4": QuantRecipe(QuantFormat.NVFP4, global_scale=3.0),
}


class AloneGroup(ThreadGroup):
    """Rank 0 of two, whose peer never comes: for one-shot kernels that find its contribution in place (SOLO)."""

    def __init__(self) -> None:
        first = thread_groups(2)[0]
        super().__init__(first.rank, first.meeting, GPU)

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        return [tensor, tensor.clone()]

    def _wait(self) -> None:
        """There is nobody to wait for."""


def require_right(found: list[TailOutput], call: Call) -> None:
    """Residual bits of the emulation, quantised bytes of the recipe."""
    residual, _ = call.expected()
    for output in found:
        assert same_bits(output.residual_out, residual)
        if call.quant is not None:
            for made, wanted in zip(
                (output.quant_out, output.quant_scale), quantize(output.norm_out, call.quant), strict=True
            ):
                assert made is not None and same_bits(made, wanted)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("form", FORMS)
def test_alone_at_one_rank(form: str, recipe: str) -> None:
    """No exchange."""
    call = random_call(1, 1, TOKENS, HIDDEN, TOP_K, quant=RECIPES[recipe])
    opened = Ranks(CudaConsumer(forms=(FORMS[form], Form())), 1, CAPACITY)
    require_right(opened(call), call)
    opened.close()


@pytest.mark.parametrize("form", FORMS)
def test_alone_of_two_ranks(form: str) -> None:
    """Pushes, reads and adds a peer's contribution that lies there already: never waits, whatever runs one by one."""
    call = random_call(2, 1, TOKENS, HIDDEN, TOP_K)
    call.outputs *= 2
    published = [local_sum(output, RoundingProfile.FP32) for output in call.outputs]
    tail = CudaConsumer(forms=(FORMS[form], Form())).open_solo(AloneGroup(), CAPACITY, published)
    found = tail(call.outputs[0], call.residual, call.norm_weight, eps=call.eps)
    torch.cuda.synchronize()
    require_right([found], call)
    tail.close()


EXCHANGES = {
    "block": (Form(),),
    "cluster": (Form(max_tokens=4, blocks=4), Form()),
    "two-shot block": (Form(two_shot=True),),
}


@pytest.mark.parametrize("forms", EXCHANGES)
def test_exchange_of_two_ranks(forms: str) -> None:
    """Both ranks at once, more tokens and fewer: slots are filled, read and re-armed."""
    opened = Ranks(CudaConsumer(forms=EXCHANGES[forms], timeout_s=WAIT_S), 2, CAPACITY)
    for seed, tokens in enumerate((3, 8, 1)):
        call = random_call(seed, 2, tokens, HIDDEN, TOP_K)
        found = opened(call)
        torch.cuda.synchronize()
        require_right(found, call)
    opened.close()


def test_short_graph_at_one_rank_of_a_block() -> None:
    """Three calls captured, replayed twice."""
    call = random_call(3, 1, TOKENS, HIDDEN, TOP_K)
    opened = Ranks(CudaConsumer(forms=(Form(),)), 1, CAPACITY)
    kept: list[TailOutput] = []

    def body() -> None:
        kept[:] = [output for _ in range(3) for output in opened(call)]

    graph = capture(body)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    require_right(kept, call)
    opened.close()
