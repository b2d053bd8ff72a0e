"""Virtual ranks on one GPU for tests: N tails opened together, called from one thread, each on its own stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_backends.cuda import CudaConsumer, CudaTail
from moe_backends.reference.local_sum import local_sum
from moe_backends.reference.rmsnorm import rms_norm
from moe_contract import MoEOutput, QuantRecipe, RoundingProfile, TailCapacity, TailOutput, UnfinalizedMoEOutput

from .thread_group import run_ranks, thread_groups

GPU = torch.device("cuda")


@dataclass
class Call:
    """One call's arguments: an output per rank, the rest alike on every rank."""

    outputs: list[MoEOutput]
    residual: Tensor
    norm_weight: Tensor
    eps: float = 1e-6
    weight_bias: float = 0.0
    quant: QuantRecipe | None = None

    def expected(self) -> tuple[Tensor, Tensor]:
        """Residual and norm by the plain PyTorch emulation of profile C, on the GPU."""
        total = local_sum(self.outputs[0], RoundingProfile.FP32).float()
        for output in self.outputs[1:]:
            total = total + local_sum(output, RoundingProfile.FP32).float()
        residual = (total + self.residual.float()).to(self.residual.dtype)
        return residual, rms_norm(residual, self.norm_weight, eps=self.eps, weight_bias=self.weight_bias)


def random_call(
    seed: int,
    ranks: int,
    tokens: int,
    hidden: int,
    top_k: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    weights_dtype: torch.dtype | None = None,
    norm_dtype: torch.dtype | None = None,
    absent: float = 0.25,
    shared: bool = True,
    scale: float = 2.5,
    finalized: bool = False,
    route_major: bool = False,
    weight_bias: float = 0.0,
    quant: QuantRecipe | None = None,
) -> Call:
    """Normal data on the GPU; rows that no slot names and weights of absent slots hold NaN."""
    made = torch.Generator(GPU).manual_seed(seed)
    outputs = []
    for _ in range(ranks):
        joined = _normal((tokens, hidden), dtype, made) if shared else None
        routed: Tensor | UnfinalizedMoEOutput
        if finalized:
            routed = _normal((tokens, hidden), dtype, made)
        else:
            weights = torch.rand(tokens, top_k, generator=made, device=GPU).to(weights_dtype or dtype)
            routed = _random_triple(weights, hidden, dtype, absent, route_major, made)
        outputs.append(MoEOutput(routed, joined, scale))
    gamma = (1 + 0.25 * torch.randn(hidden, generator=made, device=GPU)).to(norm_dtype or dtype)
    return Call(outputs, _normal((tokens, hidden), dtype, made), gamma, weight_bias=weight_bias, quant=quant)


def _normal(shape: tuple[int, int], dtype: torch.dtype, made: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=made, device=GPU).to(dtype)


def _random_triple(
    weights: Tensor, hidden: int, dtype: torch.dtype, absent: float, route_major: bool, made: torch.Generator
) -> UnfinalizedMoEOutput:
    """Rows for these weights ``[T, K]``, which get NaN where a slot is absent. A map that is free leaves three
    rows unnamed."""
    routes = weights.numel()
    rows = _normal((routes + (0 if route_major else 3), hidden), dtype, made)
    order = torch.randperm(rows.shape[0], generator=made, device=GPU)
    if route_major:
        order = torch.arange(rows.shape[0], device=GPU)
    gone = torch.rand(weights.shape, generator=made, device=GPU) < absent
    index = torch.where(gone, -1, order[:routes].view(weights.shape)).to(torch.int32)
    named = torch.zeros(rows.shape[0], dtype=torch.bool, device=GPU)
    named[index[index >= 0].long()] = True
    rows[~named] = float("nan")
    weights[gone] = float("nan")
    return UnfinalizedMoEOutput(rows, weights, index, route_major)


class Ranks:
    """N opened tails with a stream each."""

    def __init__(self, consumer: CudaConsumer, ranks: int, capacity: TailCapacity) -> None:
        groups = thread_groups(ranks)
        for group in groups:
            group.device = GPU
        self.tails: list[CudaTail] = run_ranks(groups, lambda group: consumer.open(group, capacity))
        self.streams = [torch.cuda.Stream() for _ in range(ranks)]

    def __call__(self, call: Call, order: list[int] | None = None) -> list[TailOutput]:
        """Launches a call on every rank, in the order given; the current stream waits for all."""
        current, found = torch.cuda.current_stream(), {}
        for stream in self.streams:
            stream.wait_stream(current)
        for rank in order or range(len(self.tails)):
            with torch.cuda.stream(self.streams[rank]):
                found[rank] = self.tails[rank](
                    call.outputs[rank], call.residual, call.norm_weight,
                    eps=call.eps, weight_bias=call.weight_bias, quant=call.quant,
                )  # fmt: skip
        for stream in self.streams:
            current.wait_stream(stream)
        return [found[rank] for rank in range(len(self.tails))]

    def close(self) -> None:
        """Closes every tail."""
        torch.cuda.synchronize()
        for tail in self.tails:
            tail.close()


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """``body`` as a graph, after one run to warm up."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a.view(torch.uint8), b.view(torch.uint8)))


def ulps(a: Tensor, b: Tensor) -> int:
    """Largest distance of two 16-bit tensors in units in the last place."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((ordered(a) - ordered(b)).abs().max()) if a.numel() else 0
