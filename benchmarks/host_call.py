"""Host time of an eager call of the ``cuda`` consumer without a GPU: the launch is a Python function that does nothing.

``python benchmarks/host_call.py``. Left out are the launch itself, the binding's conversion of its arguments and what
CUDA's allocator costs above the CPU's, so only differences between two revisions on one machine say something.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from moe_backends.cuda import DECLARATION, CudaTail, Engine, Form, configs, workspace
from moe_backends.cuda.build import Variant
from moe_backends.cuda.library import Library
from moe_conformance.bench.model import Cache, Mode, Point
from moe_contract import QuantFormat, QuantRecipe, TailCapacity

CALLS, BATCHES = 2000, 25
POINT = Point(mode=Mode.SOLO, cache=Cache.WARM, tokens=1, hidden_size=7168, top_k=8, ranks=1, dtype="bfloat16")


def idle_tail() -> CudaTail:
    """A tail of CPU tensors whose launches do nothing."""
    capacity = TailCapacity(16, POINT.hidden_size, POINT.top_k, torch.bfloat16)
    library = Library(Variant("bfloat16", 1, "90a"), *(lambda *_: 0 for _ in range(4)))
    group: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
    report = torch.zeros(ctypes.sizeof(workspace._Report), dtype=torch.uint8)
    space = workspace.Workspace(group, 16, [], torch.zeros(17, dtype=torch.int32), report, torch.zeros(3))
    shape = configs.Config(Form(), 448, 264, 264)
    return CudaTail(DECLARATION, capacity, Engine(library, space, capacity, (shape,), 0), 0)


def median_us(call: Callable[[], object]) -> tuple[float, float]:
    """Median and least over batches, microseconds."""
    times = []
    for _ in range(BATCHES):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - start) * 1e6 / CALLS)
    return statistics.median(times), min(times)


def main() -> None:
    """Prints a line for each kind of call."""
    from moe_conformance.bench.data import make_inputs

    torch.set_num_threads(1)
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[assignment]  # absent in a CPU build
    tail, inputs = idle_tail(), make_inputs(POINT, 0, torch.device("cpu"))
    output, residual, gamma = inputs.outputs[0], inputs.residual, inputs.norm_weight
    recipe = QuantRecipe(QuantFormat.FP8_PER_TOKEN)
    kinds: dict[str, Callable[[], object]] = {
        "call": lambda: tail(output, residual, gamma, eps=1e-6),
        "call with fp8 per token": lambda: tail(output, residual, gamma, eps=1e-6, quant=recipe),
        "two outputs of the call alone": lambda: (torch.empty_like(residual), torch.empty_like(residual)),
        "a call checked in full": lambda: (tail._memory._kinds.clear(), tail(output, residual, gamma, eps=1e-6)),
    }
    for name, call in kinds.items():
        median, least = median_us(call)
        print(f"{name}: median {median:.2f} us, least {least:.2f} us")


if __name__ == "__main__":
    main()
