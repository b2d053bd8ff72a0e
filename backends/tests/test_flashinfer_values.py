"""The FlashInfer consumer on a GPU: bits of the profile A emulation, calls in a row, one rank alone.

Its waits have no limit, and a rank that runs ahead can take away what a peer has yet to read (docs/flashinfer-tail.md).
So ranks meet after every call here, and a run of this file belongs under a time limit.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from moe_backends.flashinfer_tail import FlashInferConsumer, package
from moe_backends.flashinfer_tail.launcher import Way
from moe_backends.reference.local_sum import local_sum
from moe_backends.reference.rmsnorm import rms_norm
from moe_contract import RoundingProfile, TailCapacity, TailOutput, UnsupportedError

from .cuda_ranks import GPU, Call, Ranks, capture, random_call, same_bits, ulps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

PACKAGE = pytest.param(
    "package",
    marks=pytest.mark.skipif(
        find_spec("flashinfer") is None or not os.environ.get(package.MODULE_VARIABLE),
        reason=f"needs the flashinfer package and {package.MODULE_VARIABLE}: building its module takes minutes",
    ),
)


def published(call: Call) -> list[Tensor]:
    """What every rank sends, by profile A."""
    return [local_sum(output, RoundingProfile.STEP_ROUNDED) for output in call.outputs]


def expected(call: Call) -> Tensor:
    """The residual by profile A: rounded at every rank, in order."""
    sent = published(call)
    total = sent[0]
    for contribution in sent[1:]:
        total = total + contribution
    return total + call.residual


def require(found: list[TailOutput], call: Call, *, norm: bool = True) -> None:
    """The emulation's residual on every rank; its norm within one unit in the last place."""
    residual = expected(call)
    wanted = rms_norm(residual, call.norm_weight, eps=call.eps, weight_bias=call.weight_bias)
    for output in found:
        assert same_bits(output.residual_out, residual)
        if norm:
            assert ulps(output.norm_out, wanted) <= 1


def check(call: Call, ranks: int, top_k: int, *, norm: bool = True, way: Way = "header", repeats: int = 4) -> None:
    """Some calls in one opened tail, so that every generation of slots is used and restored."""
    tokens, hidden = call.residual.shape
    tails = Ranks(FlashInferConsumer(way=way), ranks, TailCapacity(tokens, hidden, top_k, call.residual.dtype))
    for _ in range(repeats):
        require(tails(call), call, norm=norm)
    tails.close()


@pytest.mark.parametrize("way", ["header", PACKAGE])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 1), (2, 17), (2, 129), (4, 1), (4, 40), (8, 1), (8, 4), (16, 1)])
@pytest.mark.parametrize(("hidden", "top_k"), [(7168, 8), (4096, 6), (2048, 10)])
def test_residual_has_the_bits_of_the_emulation(
    way: Way, dtype: torch.dtype, ranks: int, tokens: int, hidden: int, top_k: int
) -> None:
    """Layers whose tokens are whole warps, with absent slots, shared output, scale and the (1 + gamma) form."""
    check(random_call(hidden + tokens, ranks, tokens, hidden, top_k, dtype, weight_bias=1.0), ranks, top_k, way=way)


@pytest.mark.parametrize("options", [
    {"finalized": True}, {"route_major": True}, {"shared": False}, {"absent": 1.0}, {"absent": 0.0, "scale": 1.0},
])  # fmt: skip
def test_every_form_of_input(options: dict[str, object]) -> None:
    """Finalized, route-major, without a shared output, with every slot absent, with none absent."""
    check(random_call(3, 2, 37, 4096, 8, **options), 2, 8)  # type: ignore[arg-type]


@pytest.mark.parametrize("hidden", [2880, 1032, 8, 264])
def test_residual_is_right_where_warps_have_idle_lanes(hidden: int) -> None:
    """Hidden sizes that are no multiple of 256. Nothing is asked of their norm: it is wrong by reading the kernel."""
    check(random_call(5, 2, 9, hidden, 4), 2, 4, norm=False)


def test_sizes_up_and_down() -> None:
    """RED-5, as far as this kernel goes: calls of changing T in one tail, the ranks meeting after each."""
    calls = [random_call(n, 2, tokens, 2048, 4) for n, tokens in enumerate((1, 48, 3, 20, 2, 33, 4, 1, 40))]
    tails = Ranks(FlashInferConsumer(), 2, TailCapacity(48, 2048, 4, torch.bfloat16))
    for number in range(5 * len(calls)):
        call = calls[number % len(calls)]
        require(tails(call, [number % 2, 1 - number % 2]), call)
    tails.close()


def test_graph_replays() -> None:
    """GRAPH-1: the kernel counts its calls on the device, so a replay needs no new arguments."""
    call = random_call(1, 2, 16, 7168, 8)
    tails, kept = Ranks(FlashInferConsumer(), 2, TailCapacity(16, 7168, 8, torch.bfloat16)), []
    graph = capture(lambda: kept.append(tails(call)))
    for _ in range(50):
        for output in kept[-1]:
            output.residual_out.zero_()
        graph.replay()
        require(kept[-1], call)
    tails.close()


def test_ranks_that_do_not_fit_together_are_refused() -> None:
    """CAP-2: sixteen ranks of a thousand tokens want more of one GPU than it has."""
    with pytest.raises(UnsupportedError, match="CAP-2: 16 ranks on one GPU"):
        Ranks(FlashInferConsumer(way="header"), 16, TailCapacity(1000, 7168, 8, torch.bfloat16))


class Alone:
    """Rank 0 of a group whose peers never come; every rank's memory is on this GPU."""

    rank, device, timeout_s = 0, GPU, 10.0

    def __init__(self, size: int) -> None:
        self.size = size

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def peer_memory(self, num_bytes: int) -> list[Tensor]:
        """Zeroed."""
        return [torch.zeros(num_bytes, dtype=torch.uint8, device=GPU) for _ in range(self.size)]


@pytest.mark.parametrize("way", ["header", PACKAGE])
@pytest.mark.parametrize(("ranks", "tokens"), [(2, 1), (2, 1024), (4, 16), (8, 128), (16, 33)])
def test_one_rank_alone_never_waits_and_is_right(way: Way, ranks: int, tokens: int) -> None:
    """Solo: any number of calls, eager and in a graph, each with the bits that all ranks together would give."""
    call, top_k = random_call(2, ranks, tokens, 7168, 8), 8
    consumer = FlashInferConsumer(way=way)
    capacity = TailCapacity(tokens, 7168, top_k, torch.bfloat16)
    tail = consumer.open_solo(Alone(ranks), capacity, published(call))  # type: ignore[arg-type]

    def run() -> TailOutput:
        return tail(call.outputs[0], call.residual, call.norm_weight, eps=call.eps)

    for _ in range(7):
        require([run()], call)
    kept: list[TailOutput] = []
    graph = capture(lambda: kept.extend(run() for _ in range(5)))
    graph.replay()
    require(kept[-5:], call)
    tail.close()
