"""One run of the bench: every consumer at every point, checked, then timed."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import torch

from moe_conformance.bench.contestant import Contestant, open_contestant
from moe_conformance.bench.data import make_inputs, num_bytes
from moe_conformance.bench.model import BenchResult, BenchRow, Cache, Mode, Point, Skipped, with_ratios
from moe_conformance.bench.timing import (
    capture,
    copy_bandwidth,
    empty_node,
    flush_buffer,
    host_call,
    percentile,
    replay_times,
    steps_of,
)
from moe_conformance.cases.tail_data import TailInputs
from moe_conformance.judging.judge import judge
from moe_conformance.report.environment import environment
from moe_conformance.truth.tail_oracle import norm_truth, residual_truth
from moe_contract import Consumer, TailOutput, UnsupportedError

MEMORY = 6 * 2**30
"""Bytes of inputs and outputs over the steps of a graph; with more steps than fit, inputs come around again."""
Tell = Callable[[BenchRow | Skipped], None]


def run_bench(
    consumers: dict[str, Consumer],
    points: Sequence[Point],
    command: str,
    tell: Tell,
    save: Callable[[BenchResult], None] = lambda partial: None,
) -> BenchResult:
    """Times all consumers at all points.

    ``tell`` hears of each as it is done, and ``save`` gets what there is so far, incomplete: a kernel that never ends
    takes nothing but itself along. An interrupt ends the run early.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    flush = flush_buffer(device)
    result = BenchResult(
        complete=False,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        environment=environment("cuda"),
        driver=_driver(),
        copy_tbps=round(copy_bandwidth(device), 3),
        empty_node_us=round(empty_node(), 3),
        host_call_us={},
        rows=(),
    )
    rows: list[BenchRow] = []
    skipped: list[Skipped] = []
    try:
        for found in _measure_all(consumers, points, result.copy_tbps, flush):
            (rows if isinstance(found, BenchRow) else skipped).append(found)  # type: ignore[arg-type]  # one of the two
            tell(found)
            result = result.model_copy(update={"rows": with_ratios(rows), "skipped": tuple(skipped)})
            save(result)
        host = _host_costs(consumers, points, device)
    except KeyboardInterrupt:
        return result
    return result.model_copy(update={"complete": True, "host_call_us": host})


def _measure_all(
    consumers: dict[str, Consumer], points: Sequence[Point], copy: float, flush: torch.Tensor
) -> Iterator[BenchRow | Skipped]:
    """Point by point, so that all consumers of a comparison run within seconds of each other on the same data."""
    for point in points:
        count = max(2, min(steps_of(point.tokens), MEMORY // num_bytes(point)))
        data = [make_inputs(point, seed, flush.device) for seed in range(count if point.cache is Cache.COLD else 1)]
        for name, consumer in consumers.items():
            try:
                yield _measure(name, consumer, point, data, copy, flush)
            except UnsupportedError as error:
                yield Skipped(consumer=name, point=point.label, reason=str(error))


def _measure(
    name: str, consumer: Consumer, point: Point, data: list[TailInputs], copy: float, flush: torch.Tensor
) -> BenchRow:
    contestant = open_contestant(consumer, point, data[0], flush.device)
    try:
        graph, kept = capture(contestant, point, data)
        graph.replay()
        torch.cuda.synchronize()
        if not _right(contestant, point, data, kept):
            return BenchRow(**point.model_dump(), consumer=name, correct=False)
        times = replay_times(graph, len(kept), flush if point.cache is Cache.COLD else None)
        if not _right(contestant, point, data, kept):
            return BenchRow(**point.model_dump(), consumer=name, correct=False)
    finally:
        contestant.close()
    median = statistics.median(times)
    tbps = point.effective_bytes / median / 1e6
    return BenchRow(
        **point.model_dump(),
        consumer=name,
        correct=True,
        median_us=round(median, 3),
        p10_us=round(percentile(times, 0.1), 3),
        p90_us=round(percentile(times, 0.9), 3),
        effective_tbps=round(tbps, 3),
        share_of_copy=round(tbps / copy, 3),
    )


def _right(contestant: Contestant, point: Point, data: list[TailInputs], kept: list[list[TailOutput]]) -> bool:
    """Whether the first and the last step are within the derived bounds, on every rank. A solo tail's peers sent what
    belongs to the first inputs, so that only the first step has a result to compare."""
    last = 0 if point.mode is Mode.SOLO else len(kept) - 1
    return all(
        _within_bounds(contestant.consumer, data[number % len(data)], output)
        for number in {0, last}
        for output in kept[number]
    )


def _within_bounds(consumer: Consumer, inputs: TailInputs, output: TailOutput) -> bool:
    residual = judge(output.residual_out, residual_truth(inputs, consumer.declaration), exact=False)
    norm = judge(output.norm_out, norm_truth(output.residual_out, inputs), exact=False)
    return residual.accepted and norm.accepted


def _host_costs(consumers: dict[str, Consumer], points: Sequence[Point], device: torch.device) -> dict[str, float]:
    """Of each consumer that runs alone at T = 1, at the first point's sizes."""
    if not points:
        return {}
    point = points[0].model_copy(update={"tokens": 1, "ranks": 1, "mode": Mode.SOLO, "cache": Cache.WARM})
    inputs, found = make_inputs(point, 0, device), {}
    for name, consumer in consumers.items():
        try:
            contestant = open_contestant(consumer, point, inputs, device)
        except UnsupportedError:
            continue
        found[name] = round(host_call(contestant, inputs), 2)
        contestant.close()
    return found


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n")[0].strip()
