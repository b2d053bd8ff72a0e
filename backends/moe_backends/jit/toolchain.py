"""What a compilation needs of this machine: a compiler and a GPU it has a target for. Each lack is one clear line."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import torch

from moe_contract import UnsupportedError

ARCHITECTURES = {(9, 0): "90a", (10, 0): "100a"}
"""Compute capability to the target the kernels are compiled for: Hopper and Blackwell data-centre GPUs. Older ones
lack clusters and the fp8 conversions."""


@contextmanager
def reported_by(backend: str) -> Iterator[None]:
    """Names the backend in what is found missing inside: this package does not know for whom it works."""
    try:
        yield
    except UnsupportedError as error:
        raise UnsupportedError(f"{backend}: {error}", clause=error.clause) from error


@lru_cache(maxsize=1)
def find_nvcc() -> str:
    """Path of the CUDA compiler: under CUDA_HOME, on PATH, or where the toolkit installs itself.

    Raises:
        UnsupportedError: there is none.
    """
    homes = [Path(home) / "bin" / "nvcc" for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    on_path = shutil.which("nvcc")
    for candidate in [*homes[:-1], *([Path(on_path)] if on_path else []), homes[-1]]:
        if os.access(candidate, os.X_OK):
            return str(candidate)
    raise UnsupportedError("no CUDA compiler: install the CUDA toolkit (nvcc 12.8 or later) or set CUDA_HOME")


@lru_cache(maxsize=4)
def compiler_version(nvcc: str) -> str:
    """The last line that the compiler says of itself; part of the cache key."""
    done = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise UnsupportedError(f"{nvcc} --version failed: {(done.stderr or 'no output').strip().splitlines()[0]}")
    return lines[-1]


def architecture_of(device: torch.device) -> str:
    """The compilation target of a CUDA device, such as ``90a``.

    Raises:
        UnsupportedError: no GPU, or one that the kernels are not written for (CAP-2).
    """
    if not torch.cuda.is_available():
        raise UnsupportedError("CAP-2: torch sees no CUDA device", clause="CAP-2")
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHITECTURES:
        known = ", ".join(f"{major}.{minor}" for major, minor in ARCHITECTURES)
        raise UnsupportedError(
            f"CAP-2: compute capability {capability[0]}.{capability[1]} is not supported (supported: {known})",
            clause="CAP-2",
        )
    return ARCHITECTURES[capability]
