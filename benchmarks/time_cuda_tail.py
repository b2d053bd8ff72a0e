"""Times the fused CUDA consumer against a Triton kernel without communication, and writes a JSON file.

``python benchmarks/time_cuda_tail.py FILE``, on a GPU, with the three packages importable. Each time is the median of
replays of a CUDA graph of many steps; cold: every step has its own data, and 512 MiB are touched before each replay.
Every timed result is checked: ours bit for bit against profile C in PyTorch, the other against the derived bound of
profile C. A wrong one is not written.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from split_tail import finalize_norm
from torch import Tensor

from moe_backends.cuda import DECLARATION, SOLO, CudaConsumer, CudaTail, launch, prefill
from moe_backends.reference.local_sum import local_sum
from moe_conformance.cases import TailCase
from moe_conformance.harness.threads import run_ranks
from moe_conformance.judge import judge
from moe_conformance.oracle import residual_truth
from moe_conformance.tail_data import TailInputs, make_tail_inputs
from moe_contract import RoundingProfile, TailCapacity, UnfinalizedMoEOutput

HIDDEN, TOP_K, REPLAYS = 7168, 8, 15
RANKS, TOKENS = (1, 2), (1, 8, 16, 64, 128, 512, 1024)
STEPS = ((16, 100), (128, 50), (1024, 24))
"""Most tokens, steps of one graph: about a millisecond of work each."""
MEMORY = 4 * 2**30
"""Bytes of inputs over all steps; with more steps than fit, data is used again."""
Step = Callable[[int], None]


def inputs_of(ranks: int, tokens: int, steps: int) -> list[TailInputs]:
    """Distinct inputs for as many steps as fit in memory."""
    count = max(2, min(steps, MEMORY // (tokens * ranks * (TOP_K + 3) * HIDDEN * 2)))
    case = TailCase(
        tokens=tokens,
        top_k=TOP_K,
        hidden_size=HIDDEN,
        ranks=ranks,
        dtype="bfloat16",
        stratum="normal",
        shared=True,
        scale=2.5,
    )
    first = make_tail_inputs(case).to(torch.device("cuda"))
    # Copies lie elsewhere in memory, which is what makes a step cold; drawing each anew would take minutes.
    return [first, *(first.to(torch.device("cpu")).to(torch.device("cuda")) for _ in range(count - 1))]


def expected(inputs: TailInputs) -> Tensor:
    """``residual_out`` of profile C."""
    total = torch.zeros_like(inputs.residual, dtype=torch.float32)
    for output in inputs.outputs:
        total = total + local_sum(output, RoundingProfile.FP32).float()
    return (total + inputs.residual.float()).to(inputs.residual.dtype)


def is_right(name: str, residual_out: Tensor, inputs: TailInputs) -> bool:
    """Ours has the bits of the emulation; the compiler of the other may fuse scale and addition, so it has a bound."""
    if name == "cuda":
        return torch.equal(residual_out, expected(inputs))
    truth = residual_truth(inputs.to(torch.device("cpu")), DECLARATION)
    return judge(residual_out.cpu(), truth, exact=False).accepted


def replay_times(step: Step, steps: int, flush: Tensor) -> list[float]:
    """Microseconds of one step, for each replay of a graph of ``steps``, in ascending order."""
    step(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(steps):
            step(number)
    times = []
    for _ in range(REPLAYS):
        flush.add_(1)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / steps)
    return sorted(times)


def tensors(inputs: TailInputs) -> tuple[Tensor, ...]:
    """Rank 0's rows, weights, map, shared output, then residual and norm weight."""
    output = inputs.outputs[0]
    routed, shared = output.routed, output.shared_output
    assert isinstance(routed, UnfinalizedMoEOutput) and shared is not None
    rows, weights, index = routed.gemm2_permuted, routed.expert_weights, routed.expanded_idx_to_permuted_idx
    return rows, weights, index, shared, inputs.residual, inputs.norm_weight


def row(consumer: str, ranks: int, tokens: int, times: list[float], copy_tbps: float) -> dict[str, Any]:
    """One line of the result."""
    median = statistics.median(times)
    tbps = (TOP_K + 4) * HIDDEN * 2 * tokens / median / 1e6
    return {
        "consumer": consumer, "mode": "solo", "cache": "cold", "tokens": tokens, "hidden_size": HIDDEN, "top_k": TOP_K,
        "ranks": ranks, "dtype": "bfloat16", "median_us": round(median, 2), "p10_us": round(times[1], 2),
        "p90_us": round(times[-2], 2), "effective_tbps": round(tbps, 3), "share_of_copy": round(tbps / copy_tbps, 3),
        "correct": True,
    }  # fmt: skip


def measure(ranks: int, tokens: int, flush: Tensor, copy_tbps: float) -> list[dict[str, Any]]:
    """Both kernels on the same data: rank 0 of ``ranks`` alone on the GPU, its peers' parts already there."""
    steps = next(steps for most, steps in STEPS if tokens <= most)
    data = inputs_of(ranks, tokens, steps)
    given = [tensors(inputs) for inputs in data]
    outs = [(torch.empty_like(inputs.residual), torch.empty_like(inputs.residual)) for inputs in data]
    consumer = CudaConsumer(ranks_per_gpu=1, timeout_s=2.0)
    capacity = TailCapacity(tokens, HIDDEN, TOP_K, torch.bfloat16)
    tails: list[Any] = run_ranks(lambda group: consumer.open(group, capacity), ranks, device="cuda")
    tail: CudaTail = tails[0]
    assert tail.engine is not None
    if ranks > 1:
        prefill(tail.engine, [local_sum(output, RoundingProfile.FP32) for output in data[0].outputs])

    def ours(number: int) -> None:
        at = number % len(data)
        stream = torch.cuda.current_stream().cuda_stream
        flags = SOLO if ranks > 1 else 0
        launch(tail.engine, *given[at], *outs[at], None, None, scale=2.5, eps=1e-6, stream=stream, flags=flags)

    def triton(number: int) -> None:
        at = number % len(data)
        finalize_norm(*given[at], *outs[at], scale=2.5, eps=1e-6)

    found = []
    # The Triton kernel sums one rank's part only, so with more ranks its result cannot be checked, nor is it timed.
    for name, step in (("cuda", ours), ("triton-no-communication", triton))[: 2 if ranks == 1 else 1]:
        times = replay_times(step, steps, flush)
        if not is_right(name, outs[0][0], data[0]):
            print(f"{name} T={tokens} N={ranks}: WRONG, not written", file=sys.stderr)
            continue
        found.append(row(name, ranks, tokens, times, copy_tbps))
    for opened in tails:
        opened.close()
    return found


def copy_bandwidth() -> float:
    """Bytes read and written by a 2 GiB copy, in TB/s. Not in a graph: a copy node there is slower than the kernel."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return 2 * source.numel() / statistics.median(times) / 1e6


def main() -> None:
    """Measures every size and writes the file named on the command line."""
    flush = torch.zeros(2**26, dtype=torch.int64, device="cuda")
    copy_tbps = copy_bandwidth()
    rows = [r for ranks in RANKS for tokens in TOKENS for r in measure(ranks, tokens, flush, copy_tbps)]
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    device = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    about = {"schema_version": 1, "device": device, "torch": torch.__version__, "copy_tbps": round(copy_tbps, 3)}
    result = {**about, "rows": rows}
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for r in rows:
        print(r["consumer"], f"N={r['ranks']} T={r['tokens']}", r["median_us"], "us", r["share_of_copy"])


if __name__ == "__main__":
    main()
