"""Times of CUDA graphs: many steps in one graph, many replays, sorted times of one step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_conformance.bench.contestant import Contestant
from moe_conformance.bench.model import Cache, Mode, Point
from moe_conformance.cases.tail_data import TailInputs
from moe_contract import TailOutput

REPLAYS = 25
STEPS = ((16, 100), (128, 50), (1024, 24))
"""Most tokens, steps of a graph: about a millisecond of work each. Larger calls: 8."""
FLUSH_BYTES = 2**29
"""Read before a cold replay; eight times the 60 MiB L2 of an H200."""
COPY_BYTES = 2**31
HOST_CALLS = 50
"""Eager calls between two synchronisations: few enough that the launch queue never fills."""
Captured = tuple[torch.cuda.CUDAGraph, list[list[TailOutput]]]


def steps_of(tokens: int) -> int:
    """How many steps one graph has."""
    return next((steps for most, steps in STEPS if tokens <= most), 8)


def capture(contestant: Contestant, point: Point, data: Sequence[TailInputs]) -> Captured:
    """A graph of the point's steps, after a warm-up, and the outputs of each step, each in memory of its own."""
    steps = steps_of(point.tokens)
    given = [data[0 if point.cache is Cache.WARM else number % len(data)] for number in range(steps)]
    for inputs in given[:2]:
        contestant.fork()
        contestant.step(inputs)
        contestant.join()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept: list[list[TailOutput]] = []
    with torch.cuda.graph(graph):
        contestant.fork()
        for inputs in given:
            if point.mode is Mode.JOIN and kept:
                contestant.join()
                contestant.fork()
            kept.append(contestant.step(inputs))
        contestant.join()
    return graph, kept


def replay_times(graph: torch.cuda.CUDAGraph, steps: int, flush: Tensor | None, replays: int = REPLAYS) -> list[float]:
    """Microseconds of one step for each replay, ascending; ``flush`` is read before each."""

    def prepare() -> None:
        if flush is not None:
            flush.sum()

    return [us / steps for us in event_times(graph.replay, prepare, replays)]


def event_times(body: Callable[[], object], prepare: Callable[[], None], repeats: int) -> list[float]:
    """Microseconds between events around ``body``, ascending."""
    times = []
    for _ in range(repeats):
        prepare()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        body()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)


def percentile(times: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the ascending times lie, by the nearest rank."""
    return times[min(len(times) - 1, round(share * (len(times) - 1)))]


def flush_buffer(device: torch.device) -> Tensor:
    """What a cold replay reads first."""
    return torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=device)


def copy_bandwidth(device: torch.device) -> float:
    """TB/s read and written by a copy of 2 GiB; outside a graph, whose copy nodes are slower than the kernel."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = event_times(lambda: target.copy_(source), lambda: None, REPLAYS)
    return 2 * COPY_BYTES / statistics.median(times) / 1e6


def empty_node() -> float:
    """Microseconds of one node of a graph of 100 kernels that do nothing: torch's sleep of 0 cycles."""
    nodes = 100
    torch.cuda._sleep(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(nodes):
            torch.cuda._sleep(0)
    return statistics.median(replay_times(graph, nodes, None))


def host_call(contestant: Contestant, inputs: TailInputs) -> float:
    """Microseconds that one eager call keeps the host busy: the median of batches of calls."""
    tail, output = contestant.tails[0], inputs.outputs[0]
    times = []
    with torch.cuda.stream(contestant.streams[0]):
        for _ in range(REPLAYS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(HOST_CALLS):
                tail(output, inputs.residual, inputs.norm_weight, eps=inputs.eps)
            times.append((time.perf_counter() - start) * 1e6 / HOST_CALLS)
    torch.cuda.synchronize()
    return statistics.median(times)
