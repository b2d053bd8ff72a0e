"""Times the DeepSeek-V3 layer through the emulated TRTLLM producers: seconds and the process's peak memory.

``python benchmarks/trtllm_layer.py [bf16|nvfp4]... [--intermediate I]`` runs each in a process of its own: E 256, K 8,
H 7168, T 128, grouped routing with a bias; the intermediate size of one rank's part is cut to I. Weights are prepared
when the call selects an expert, so preparation is part of the call. Aim: at most 30 s and 12 GB on two cores.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch

from moe_backends.trtllm import Emulator, bf16_producer, nvfp4_producer
from moe_contract import Activation, ExpertWeights, MoEConfig, MoELayer, Routing, RoutingMethod, UnfinalizedMoEOutput

E, H, T, K = 256, 7168, 128, 8
GROUPS, KEPT, SCALE = 8, 4, 2.5
MAKERS = {"bf16": bf16_producer, "nvfp4": nvfp4_producer}
SHIFT = 4099
"""Experts are windows on one pool of random numbers, this far apart: drawing each anew would take long."""


def layer(intermediate: int, generator: torch.Generator) -> MoELayer:
    """One rank's part of the layer."""
    pool = torch.randn(E * SHIFT + intermediate * H, generator=generator).to(torch.bfloat16)

    def draw(rows: int, columns: int) -> torch.Tensor:
        return pool.as_strided((E, rows * columns), (SHIFT, 1)).reshape(E, rows, columns).contiguous()

    routing = Routing(
        RoutingMethod.DEEPSEEK_V3, K, GROUPS, KEPT, routed_scaling_factor=SCALE, bias=0.1 * torch.randn(E)
    )
    weights = ExpertWeights(draw(intermediate, H), draw(H, intermediate), draw(intermediate, H))
    return MoELayer(H, E, routing, Activation.SILU, weights)


def measure(name: str, intermediate: int) -> None:
    """Prints the times of loading and of two calls, and the peak memory of this process."""
    generator = torch.Generator().manual_seed(0)
    part = layer(intermediate, generator)
    hidden, logits = torch.randn(T, H, generator=generator).to(torch.bfloat16), torch.randn(T, E, generator=generator)
    producer = MAKERS[name](Emulator(), emulated=True)
    times = []
    for _ in range(2):
        started, used = time.perf_counter(), time.process_time()
        output = producer.load(part, MoEConfig(defer_moe_finalize=True, tp_size=8))(hidden, logits)
        times.append(f"{time.perf_counter() - started:.1f} s ({time.process_time() - used:.1f} s of CPU)")
    assert isinstance(output, UnfinalizedMoEOutput)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    rows = list(output.gemm2_permuted.shape)
    print(f"{name} I {intermediate}: first call {times[0]}, second {times[1]}, {peak:.1f} GB, rows {rows}", flush=True)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("producers", nargs="*", choices=[*MAKERS, []], help="default: both")
    parser.add_argument("--intermediate", type=int, default=128, help="2048 / 16 ranks unless told otherwise")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    names = options.producers or list(MAKERS)
    if len(names) == 1:
        torch.set_num_threads(options.threads)
        measure(names[0], options.intermediate)
        return
    for name in names:
        arguments = ["--intermediate", str(options.intermediate), "--threads", str(options.threads)]
        subprocess.run([sys.executable, __file__, name, *arguments], check=True)


if __name__ == "__main__":
    main()
