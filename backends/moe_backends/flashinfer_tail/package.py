"""The second way: the flashinfer package's own operator, its extension module built by it or brought along."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from moe_backends.jit.toolchain import architecture_of
from moe_contract import UnsupportedError

from .kernel import Call
from .plan import MAX_CLUSTER, Shape, estimated_resident

MODULE_VARIABLE = "MOE_FLASHINFER_COMM_SO"
_lock = threading.Lock()


class PackageKernel:
    """``flashinfer.comm.trtllm_moe_finalize_allreduce_fusion``."""

    way = "package"
    max_cluster = MAX_CLUSTER
    """What the package's launcher takes; it does not say what the device runs."""

    def __init__(self, operator: Callable[..., None], ranks: int) -> None:
        """Use open_kernel, which finds the operator."""
        self._operator, self._ranks = operator, ranks

    def resident(self, shape: Shape) -> int:
        """A lower bound from the device's properties: the package does not give access to the kernel itself."""
        found = torch.cuda.get_device_properties(torch.cuda.current_device())
        return estimated_resident(
            shape,
            self._ranks,
            sms=found.multi_processor_count,
            threads=found.max_threads_per_multi_processor,
        )

    def run(self, call: Call) -> None:
        """Calls the operator, by keyword: its parameters have been reordered between versions."""
        with torch.cuda.device(call.residual.device):  # the operator has no guard of its own
            self._operator(
                allreduce_in=call.rows,
                residual_in=call.residual,
                norm_weight=call.norm_weight,
                expanded_idx_to_permuted_idx=call.index,
                norm_out=call.norm_out,
                residual_out=call.residual_out,
                quant_out=None,
                scale_out=None,
                workspace_ptrs=call.table,
                launch_with_pdl=call.pdl,
                world_rank=call.rank,
                world_size=call.ranks,
                eps=call.eps,
                shared_expert_output=call.shared,
                expert_scale_factor=call.weights,
                routed_scaling_factor=call.scale,
                weight_bias=call.weight_bias,
            )


def open_kernel(ranks: int, device: torch.device) -> PackageKernel:
    """Imports the package and has its extension module ready, built or taken from MOE_FLASHINFER_COMM_SO.

    Raises:
        UnsupportedError: no GPU, no package, or no extension module; one line.
    """
    architecture_of(device)
    with _lock, torch.cuda.device(device):
        return PackageKernel(_operator(), ranks)


def _operator() -> Callable[..., None]:
    # What a package raises while it is imported or builds is its own affair: RuntimeError, AssertionError, and others.
    try:
        comm, inner = import_module("flashinfer.comm"), import_module("flashinfer.comm.trtllm_ar")
    except Exception as error:
        raise UnsupportedError(f"the flashinfer package cannot be imported: {_line(error)}") from error
    if given := os.environ.get(MODULE_VARIABLE):
        _replace_module(inner, Path(given))
    try:
        inner.get_trtllm_comm_module()
    except Exception as error:
        raise UnsupportedError(
            f"flashinfer's trtllm_comm module cannot be built or loaded: {_line(error)}; "
            f"{MODULE_VARIABLE} may name one that was built elsewhere"
        ) from error
    found: Callable[..., None] = comm.trtllm_moe_finalize_allreduce_fusion
    return found


def _replace_module(inner: Any, path: Path) -> None:
    """Lets FlashInfer find the extension module at ``path`` where it would otherwise build its own."""
    if not path.is_file():
        raise UnsupportedError(f"{MODULE_VARIABLE}={path} is not a file")
    import tvm_ffi

    ready = SimpleNamespace(build_and_load=lambda: tvm_ffi.load_module(str(path)))
    inner.gen_trtllm_comm_module = lambda: ready


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
