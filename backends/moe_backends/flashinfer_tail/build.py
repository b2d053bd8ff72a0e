"""Compiles FlashInfer's kernel header behind our C functions at first use; one library per architecture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from moe_backends.jit.cache import cached, digest, run
from moe_backends.jit.toolchain import compiler_version, find_nvcc
from moe_contract import UnsupportedError

SOURCE = Path(__file__).parent / "kernels" / "launch.cu"
WORLD_SIZES = (2, 4, 8, 16)
"""Rank counts that the header has kernels for."""
DTYPES = {"bfloat16": 0, "float16": 1}
"""Activation dtype to the number that launch.cu knows it by."""
HOME_VARIABLE = "MOE_FLASHINFER_HOME"
LIBRARY_VARIABLE = "MOE_FLASHINFER_TAIL_SO"
HEADER = Path("flashinfer", "comm", "trtllm_moe_allreduce_fusion.cuh")
PLACES = (Path("flashinfer", "data"), Path("data"), Path())
"""Where ``include`` lies: in an unpacked wheel, in the package's folder, in a checkout."""
SPDLOG = (Path("spdlog", "include"), Path("3rdparty", "spdlog", "include"))
"""spdlog beside it, which the header logs through: in the wheel, in a checkout."""
FLAGS = (
    "-O3",
    "-std=c++17",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
    "--diag-suppress=20012",  # device functions that the host never calls
    "-use_fast_math",
    "-DNDEBUG",
    "-DFLASHINFER_ENABLE_F16",
    "-DFLASHINFER_ENABLE_BF16",
    "-DFLASHINFER_ENABLE_FP8_E4M3",
    "-DFLASHINFER_ENABLE_FP8_E5M2",
)
"""From -use_fast_math on, what FlashInfer's own build passes (flashinfer/jit/core.py), so that the machine code is that
of its users. Fast math flushes float32 subnormals to zero."""


@dataclass(frozen=True)
class Headers:
    """FlashInfer's include folder and that of spdlog."""

    include: Path
    spdlog: Path

    def files(self) -> list[tuple[str, Path]]:
        """What the kernel's header includes of FlashInfer, by name: it and those of the folder above it."""
        beside = sorted(path for path in (self.include / "flashinfer").iterdir() if path.suffix in (".h", ".cuh"))
        return [(path.relative_to(self.include).as_posix(), path) for path in (self.include / HEADER, *beside)]


def find_headers() -> Headers:
    """In MOE_FLASHINFER_HOME where that is set, else in the installed package, which is not imported.

    Raises:
        UnsupportedError: they are in neither; one line.
    """
    home = os.environ.get(HOME_VARIABLE)
    roots = [Path(home)] if home else _package_folders()
    for root in (folder / place for folder in roots for place in PLACES):
        for spdlog in (root / place for place in SPDLOG):
            if (root / "include" / HEADER).is_file() and spdlog.is_dir():
                return Headers(root / "include", spdlog)
    looked = f"{HOME_VARIABLE}={home} has no {PLACES[0] / 'include' / HEADER}" if home else "flashinfer is missing"
    raise UnsupportedError(
        f"{looked}: pip install 'moe-conformance[flashinfer]', or set {HOME_VARIABLE} to an unpacked flashinfer-python "
        "wheel"
    )


def library_path(architecture: str) -> Path:
    """The library: MOE_FLASHINFER_TAIL_SO where that is set, else from the cache; compiled if the cache lacks it.

    Raises:
        UnsupportedError: no such file, no headers, no compiler, or the compilation failed; one line.
    """
    if given := os.environ.get(LIBRARY_VARIABLE):
        if not Path(given).is_file():
            raise UnsupportedError(f"{LIBRARY_VARIABLE}={given} is not a file")
        return Path(given)
    headers, nvcc = find_headers(), find_nvcc()
    name = f"flashinfer-tail-sm{architecture}"
    sources = [(SOURCE.name, SOURCE), *headers.files()]
    key = digest(sources, (*FLAGS, architecture, nvcc, compiler_version(nvcc)))
    return cached(name, key, lambda scratch: compile_library(headers, architecture, scratch / "tail.so"))


def compile_library(headers: Headers, architecture: str, target: Path) -> Path:
    """Compiles and links for an architecture such as ``90a``; needs no GPU. Raises UnsupportedError if it fails."""
    run(target.name, compile_command(headers, architecture, target))
    return target


def compile_command(headers: Headers, architecture: str, target: Path) -> list[str]:
    """The compiler's arguments, from source to library."""
    return [
        find_nvcc(),
        *FLAGS,
        f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
        f"-I{headers.include}",
        f"-I{headers.spdlog}",
        "-shared",
        "-cudart",
        "static",
        str(SOURCE),
        "-o",
        str(target),
    ]


def _package_folders() -> list[Path]:
    spec = find_spec("flashinfer")
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
