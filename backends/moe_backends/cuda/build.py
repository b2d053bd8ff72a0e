"""Compiles the kernels at first use into a cache; one library per activation dtype, rank count and architecture."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moe_contract import UnsupportedError

from .toolchain import compiler_version, find_binding, find_nvcc

SOURCES = Path(__file__).parent / "kernels"
DTYPES = {"bfloat16": 0, "float16": 1}
"""Activation dtype to the number that launch.cu knows it by (MOE_DTYPE)."""
WORLD_SIZES = (1, 2, 4, 8, 16)
"""Rank counts that the kernels are instantiated for; powers of two, as tensor parallelism uses them."""
FLAGS = ("-O3", "-std=c++17", "-Xcompiler", "-fPIC,-fvisibility=hidden", "--diag-suppress=20012")
CACHE_VARIABLE = "MOE_CONFORMANCE_CACHE"


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


def cache_dir() -> Path:
    """Where libraries are kept: MOE_CONFORMANCE_CACHE, else the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-conformance"


def build(variant: Variant) -> Path:
    """The library of a variant; compiled if the cache does not hold it. Safe across processes and threads.

    Raises:
        UnsupportedError: no compiler, no binding, or the compilation failed; one line.
    """
    folder = cache_dir()
    library = folder / f"{variant.name}-{_key(variant)}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                _compile(variant, library)
    except OSError as error:
        raise UnsupportedError(f"cuda: the cache {folder} cannot be used: {error}; set {CACHE_VARIABLE}") from error
    return library


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


def _compile(variant: Variant, library: Path) -> None:
    binding, nvcc = find_binding(), find_nvcc()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        device, host, linked = (Path(scratch) / name for name in ("launch.o", "binding.o", "tail.so"))
        _require(variant, compile_device(variant, device))
        includes = [f"-I{path}" for path in binding.include_dirs]
        _run(variant, [nvcc, *FLAGS, *includes, "-c", str(SOURCES / "binding.cc"), "-o", str(host)])
        lib = Path(binding.library)
        search = ["-L" + str(lib.parent), "-l" + lib.stem.removeprefix("lib"), "-Xlinker", f"-rpath={lib.parent}"]
        _run(variant, [nvcc, "-shared", "-cudart", "static", str(device), str(host), *search, "-o", str(linked)])
        linked.replace(library)  # atomic: a reader sees a whole library or none


def _run(variant: Variant, command: list[str]) -> None:
    _require(variant, subprocess.run(command, capture_output=True, text=True, check=False))


def _require(variant: Variant, done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode == 0:
        return
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines or [f"exit status {done.returncode}"]
    raise UnsupportedError(f"cuda: compiling {variant.name} failed: {errors[0]}")


def _key(variant: Variant) -> str:
    """A digest of everything that decides what the library contains."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    nvcc = find_nvcc()
    for part in (*FLAGS, *variant.device_flags(), nvcc, compiler_version(nvcc), find_binding().version):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process compiles a library; the others wait and find it. The kernel frees the lock of a dead one."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
