"""Compiles the kernels at first use into a cache; one library per activation dtype, rank count and architecture."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from moe_backends.jit.cache import cached, digest, require, run
from moe_backends.jit.toolchain import compiler_version, find_nvcc, reported_by

from .binding import find_binding

SOURCES = Path(__file__).parent / "kernels"
DTYPES = {"bfloat16": 0, "float16": 1}
"""Activation dtype to the number that launch.cu knows it by (MOE_DTYPE)."""
WORLD_SIZES = (1, 2, 4, 8, 16)
"""Rank counts that the kernels are instantiated for; powers of two, as tensor parallelism uses them."""
FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--diag-suppress=20012")


@dataclass(frozen=True)
class Variant:
    """One library: what is fixed when it is compiled."""

    dtype: str
    """``bfloat16`` or ``float16``."""
    ranks: int
    architecture: str
    """Such as ``90a``."""
    test_hooks: bool = False
    """With the stalls that the RED-5 tests switch on; never used otherwise."""

    @property
    def name(self) -> str:
        """A readable file stem."""
        return f"tail-{self.dtype}-n{self.ranks}-sm{self.architecture}{'-hooks' if self.test_hooks else ''}"

    def device_flags(self) -> list[str]:
        """Flags of the device compilation, beside FLAGS."""
        target = f"arch=compute_{self.architecture},code=sm_{self.architecture}"
        defines = [f"-DMOE_DTYPE={DTYPES[self.dtype]}", f"-DMOE_RANKS={self.ranks}"]
        return [f"-gencode={target}", *defines, *(["-DMOE_TEST_STALL"] if self.test_hooks else [])]


def build(variant: Variant) -> Path:
    """The library of a variant; compiled if the cache does not hold it. Safe across processes and threads.

    Raises:
        UnsupportedError: no compiler, no binding, or the compilation failed; one line.
    """
    with reported_by("cuda"):
        return cached(variant.name, _key(variant), lambda scratch: _compile(variant, scratch))


def compile_device(variant: Variant, target: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    """Compiles launch.cu alone to an object file; needs neither GPU nor binding."""
    command = [
        find_nvcc(),
        *FLAGS,
        *variant.device_flags(),
        *extra,
        "-c",
        str(SOURCES / "launch.cu"),
        "-o",
        str(target),
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _compile(variant: Variant, scratch: Path) -> Path:
    binding, nvcc = find_binding(), find_nvcc()
    device, host, linked = (scratch / name for name in ("launch.o", "binding.o", "tail.so"))
    require(variant.name, compile_device(variant, device))
    includes = [f"-I{path}" for path in binding.include_dirs]
    run(variant.name, [nvcc, *FLAGS, *includes, "-c", str(SOURCES / "binding.cc"), "-o", str(host)])
    lib = Path(binding.library)
    search = ["-L" + str(lib.parent), "-l" + lib.stem.removeprefix("lib"), "-Xlinker", f"-rpath={lib.parent}"]
    run(variant.name, [nvcc, "-shared", "-cudart", "static", str(device), str(host), *search, "-o", str(linked)])
    return linked


def _key(variant: Variant) -> str:
    """A digest of everything that decides what the library contains."""
    nvcc = find_nvcc()
    parts = (*FLAGS, *variant.device_flags(), nvcc, compiler_version(nvcc), find_binding().version)
    return digest([(source.name, source) for source in sorted(SOURCES.iterdir())], parts)
