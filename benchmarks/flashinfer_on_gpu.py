"""What of FlashInfer runs on this GPU, against this project: the adapters' gate, weight shuffles, quantisers.

``python benchmarks/flashinfer_on_gpu.py [--wheel WHEEL] [--packages FOLDER] [--json FILE]``

FlashInfer is the installed package, or WHEEL unpacked into a temporary folder; FOLDER holds packages that it imports
and the environment lacks (apache-tvm-ffi first of all). Nothing is installed. One line for each check: ``same`` bits,
``refused`` with the reason that was wanted, ``not here`` with why FlashInfer itself cannot do it on this GPU, or
``WRONG``. Exit status 1 where anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_backends.common.nvfp4 import nvfp4_linear, swizzle_scales
from moe_backends.trtllm import bf16_producer, nvfp4_producer
from moe_backends.trtllm.weights import bf16, nvfp4
from moe_backends.trtllm.weights.rows import EPILOGUE_TILE, first_gemm_order, second_gemm_order
from moe_contract import (
    Activation,
    ExpertWeights,
    MoEConfig,
    MoELayer,
    Routing,
    RoutingMethod,
    UnsupportedError,
)
from moe_contract.quant import NVFP4_HIDDEN_SCALE

E, INNER, H, T = 2, 256, 512, 64
Result = tuple[str, str]


def weights(gated: bool, device: str) -> ExpertWeights:
    """Random experts, bfloat16."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(torch.bfloat16).to(device)

    return ExpertWeights(draw(E, INNER, H), draw(E, H, INNER), draw(E, INNER, H) if gated else None)


def gate(make: Callable[[], Any], device: str) -> Result:
    """The real adapter: refused with the reason on every GPU but those of compute capability 10.x, never an abort."""
    producer = make()
    reason = producer.unavailable(device)
    layer = MoELayer(H, E, Routing(RoutingMethod.RENORMALIZE, 1), Activation.SILU, weights(True, device))
    try:
        producer.load(layer, MoEConfig(defer_moe_finalize=True, tp_size=2))
    except UnsupportedError as error:
        told = reason and (reason in str(error) or device == "cpu")  # a CPU is refused by the declaration first
        return ("refused" if told else "WRONG"), f"flashinfer {version_here()}: {error}"
    return ("WRONG" if reason else "same"), reason or "loaded: this GPU runs the kernels"


def suite(name: str) -> Result:
    """The suite on the real adapter in a process of its own: what it says, and that the process ended by itself."""
    command = [sys.executable, "-m", "moe_conformance", "run", "--producer", name, "--device", "cuda"]
    done = subprocess.run([*command, "--profile", "smoke", "--clause", "OUT-2"], capture_output=True, text=True)
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    text = " ".join(lines[-3:]) if lines else "no output"
    return ("refused" if done.returncode in (2, 3) else "same" if done.returncode == 0 else "WRONG"), (
        f"exit status {done.returncode}: {text}"
    )


def bf16_shuffle(core: Any, device: str, gated: bool) -> Result:
    """Row order, shuffle and column blocks of bfloat16 weights."""
    given = weights(gated, device)
    prepared = bf16.prepare(given)
    halves = [given.up] if given.gate is None else [given.up, given.gate]
    for expert in range(E):
        for matrix, found, first in (
            (torch.cat([half[expert] for half in halves]), prepared.gemm1[expert], True),
            (given.down[expert], prepared.gemm2[expert], False),
        ):
            data = matrix.contiguous().view(torch.uint8)
            shuffled = data[order(core, data, gated, first)].contiguous()
            if not torch.equal(found.view(torch.uint8), core.convert_to_block_layout(shuffled, 128)):
                return "WRONG", f"{'first' if first else 'second'} projection of expert {expert} differs"
    return "same", f"{E} experts, I {INNER}, H {H}"


def shuffle_functions(flashinfer: Any, device: str) -> Result:
    """``reorder_rows_for_gated_act_gemm`` and ``shuffle_matrix_a``, one after the other."""
    given = weights(True, device)
    assert given.gate is not None
    rows = torch.cat([given.up[0], given.gate[0]])
    theirs = flashinfer.shuffle_matrix_a(
        flashinfer.reorder_rows_for_gated_act_gemm(rows).contiguous().view(torch.uint8), EPILOGUE_TILE
    )
    ours = rows[first_gemm_order(len(rows), gated=True).to(device)].contiguous().view(torch.uint8)
    return ("same" if torch.equal(theirs, ours) else "WRONG"), f"{len(rows)} rows"


def nvfp4_shuffle(core: Any, flashinfer: Any, device: str) -> Result:
    """Row order of codes and block scales, and the swizzle of block scales, by FlashInfer's GPU kernel."""
    prepared = nvfp4.prepare(weights(True, device))
    for codes, scales, first in (
        (prepared.gemm1, prepared.gemm1_scale, True),
        (prepared.gemm2, prepared.gemm2_scale, False),
    ):
        rows = codes.shape[1]
        mine = first_gemm_order(rows, gated=True) if first else second_gemm_order(rows)
        linear_codes, linear_scales = nvfp4.restore(codes, scales, mine)
        if not torch.equal(codes[0], linear_codes[0][order(core, linear_codes[0], True, first)]):
            return "WRONG", "row order of codes"
        ordered = linear_scales[0][order(core, linear_scales[0], True, first, num_elts_per_sf=16)].contiguous()
        theirs = flashinfer.block_scale_interleave(ordered).view(torch.uint8).reshape(-1)
        if not torch.equal(theirs, scales[0].view(torch.uint8).reshape(-1)):
            return "WRONG", "swizzled block scales"
    return "same", "codes and swizzled block scales of both projections"


def quantizer(flashinfer: Any, device: str, swizzled: bool) -> Result:
    """``fp4_quantize`` against the contract's recipe. Its kernel is compiled for 10.0 and later only: before, its body
    is empty and the buffers come back as they were allocated."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(T, H, generator=generator).to(torch.bfloat16).to(device)
    scale = torch.full((1,), NVFP4_HIDDEN_SCALE, device=device)
    codes, scales = flashinfer.fp4_quantize(
        hidden, scale, sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=swizzled
    )
    torch.cuda.synchronize()
    mine_codes, mine_scales = nvfp4_linear(hidden.float(), scale[0])
    mine_scales = swizzle_scales(mine_scales) if swizzled else mine_scales
    right = (codes.view(torch.uint8) == mine_codes).float().mean().item()
    right_scales = (scales.view(torch.uint8).reshape(-1) == mine_scales.reshape(-1)).float().mean().item()
    text = f"{right:.2%} of the code bytes and {right_scales:.2%} of the block scales are the recipe's"
    if right == right_scales == 1.0:
        return "same", text
    capable = torch.cuda.get_device_capability(device) >= (10, 0)
    return ("WRONG" if capable else "not here"), text


def order(core: Any, data: Tensor, gated: bool, first: bool, **options: int) -> Tensor:
    """FlashInfer's row order of one expert's matrix."""
    if first:
        found: Tensor = core._maybe_get_cached_w3_w1_permute_indices(
            {}, data, EPILOGUE_TILE, is_gated_act_gemm=gated, **options
        )
    else:
        found = core.get_w2_permute_indices_with_cache({}, data, EPILOGUE_TILE, **options)
    return found.to(data.device)


def version_here() -> str:
    """The version that the adapters see."""
    return version("flashinfer-python")


def checks(device: str) -> dict[str, Callable[[], Result]]:
    """Every check by name. FlashInfer is imported here, after the gate had its say without an import."""
    import flashinfer
    import flashinfer.fused_moe.core as core

    found: dict[str, Callable[[], Result]] = {
        f"bfloat16 weights, {'gated' if gated else 'not gated'}": lambda gated=gated: bf16_shuffle(core, device, gated)
        for gated in (True, False)
    }
    found["reorder_rows_for_gated_act_gemm, shuffle_matrix_a"] = lambda: shuffle_functions(flashinfer, device)
    if device != "cpu":
        found["NVFP4 weights, block_scale_interleave"] = lambda: nvfp4_shuffle(core, flashinfer, device)
        found["fp4_quantize, linear scales"] = lambda: quantizer(flashinfer, device, False)
        found["fp4_quantize, swizzled scales"] = lambda: quantizer(flashinfer, device, True)
    return found


def attempt(check: Callable[[], Result]) -> Result:
    """The check's result; what FlashInfer raises is why it cannot do it here."""
    try:
        return check()
    except Exception as error:
        return "not here", f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"


def run_checks(device: str) -> dict[str, Result]:
    """All of them, printed as they end."""
    results: dict[str, Result] = {}

    def note(name: str, result: Result) -> None:
        results[name] = result
        print(f"{result[0]:8} {name}: {result[1]}", flush=True)

    for name, make in (("trtllm-bf16", bf16_producer), ("trtllm-nvfp4", nvfp4_producer)):
        note(f"{name} gate", gate(make, device))
        note(f"{name} in the suite", suite(name))
    try:
        found = checks(device)
    except Exception as error:
        note("import flashinfer", ("not here", f"{type(error).__name__}: {error}"))
        return results
    for name, check in found.items():
        note(name, attempt(check))
    return results


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="a wheel of flashinfer-python, unpacked for this run")
    parser.add_argument("--packages", type=Path, action="append", default=[], help="folder of further packages")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        if options.wheel is not None:
            with zipfile.ZipFile(options.wheel) as archive:
                archive.extractall(folder)
            add_path(folder)
        for packages in options.packages:
            add_path(str(packages.resolve()), last=True)
        capability = ".".join(map(str, torch.cuda.get_device_capability())) if device == "cuda" else "none"
        name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        print(f"{name}, compute capability {capability}, torch {torch.__version__}, flashinfer {version_here()}")
        results = run_checks(device)
    if options.json is not None:
        found = {"device": name, "capability": capability, "torch": torch.__version__, "checks": results}
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(verdict == "WRONG" for verdict, _ in results.values()))


def add_path(folder: str, *, last: bool = False) -> None:
    """Where this process and those that it starts look for packages; ``last``: after what is installed."""
    sys.path.insert(len(sys.path) if last else 0, folder)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, folder] if last else [folder, *paths]))


if __name__ == "__main__":
    sys.exit(main())
