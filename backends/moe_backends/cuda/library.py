"""Loads a compiled variant: the one place that knows the binding."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moe_backends.jit.toolchain import architecture_of, reported_by
from moe_contract import UnsupportedError
from moe_contract.dtypes import dtype_name

from .build import Variant, build


@dataclass(frozen=True)
class Library:
    """The functions of one compiled variant (kernels/binding.cc). They release the interpreter lock while they run."""

    variant: Variant
    resident: Callable[..., int]
    """``(threads, cluster, two_shot, vecs)``: blocks or clusters that the current device holds together."""
    create: Callable[..., int]
    destroy: Callable[[int], None]
    run: Callable[..., None]


_loaded: dict[Variant, Library] = {}
_lock = threading.Lock()


def load(dtype: torch.dtype, ranks: int, device: torch.device, *, test_hooks: bool = False) -> Library:
    """The library for a dtype, a number of ranks and a device, its kernels loaded on the device; built if need be.

    Raises:
        UnsupportedError: this machine or this GPU cannot build or run it; one line.
    """
    with reported_by("cuda"):
        architecture = architecture_of(device)
    variant = Variant(dtype_name(dtype), ranks, architecture, test_hooks)
    with _lock:
        if variant not in _loaded:
            _loaded[variant] = _open(variant, build(variant), device)
        return _loaded[variant]


def _open(variant: Variant, path: Path, device: torch.device) -> Library:
    import tvm_ffi

    try:
        module: Any = tvm_ffi.load_module(str(path))
        with torch.cuda.device(device):
            module.load()
    except (OSError, RuntimeError) as error:
        raise UnsupportedError(f"cuda: {path.name} cannot be loaded: {str(error).splitlines()[0]}") from error
    return Library(variant, module.resident, module.create, module.destroy, module.run)
