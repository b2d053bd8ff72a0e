"""The cache of compiled libraries: each is compiled once, whole or not at all, whoever asks at the same time."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from moe_contract import UnsupportedError

CACHE_VARIABLE = "MOE_CONFORMANCE_CACHE"


def cache_dir() -> Path:
    """Where libraries are kept: MOE_CONFORMANCE_CACHE, else the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe-conformance"


def cached(name: str, key: str, make: Callable[[Path], Path]) -> Path:
    """The library of a name and a key. Where the cache lacks it, ``make`` is given a scratch folder and returns the
    file it linked there. Safe across processes and threads.

    Raises:
        UnsupportedError: the cache cannot be used, or what ``make`` raises; one line.
    """
    folder = cache_dir()
    library = folder / f"{name}-{key}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.exists():
                with tempfile.TemporaryDirectory(dir=folder) as scratch:
                    make(Path(scratch)).replace(library)  # atomic: a reader sees a whole library or none
    except OSError as error:
        raise UnsupportedError(f"the cache {folder} cannot be used: {error}; set {CACHE_VARIABLE}") from error
    return library


def digest(files: Iterable[tuple[str, Path]], parts: Iterable[str]) -> str:
    """Of everything that decides what a library contains: sources by name and content, flags, versions."""
    found = hashlib.sha256()
    for name, path in files:
        found.update(name.encode() + b"\0" + path.read_bytes())
    for part in parts:
        found.update(part.encode() + b"\0")
    return found.hexdigest()[:16]


def run(name: str, command: list[str]) -> None:
    """One step of compiling ``name``; UnsupportedError with the compiler's first error if it fails."""
    require(name, subprocess.run(command, capture_output=True, text=True, check=False))


def require(name: str, done: subprocess.CompletedProcess[str]) -> None:
    """The same for a step that has ended."""
    if done.returncode == 0:
        return
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines or [f"exit status {done.returncode}"]
    raise UnsupportedError(f"compiling {name} failed: {errors[0]}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process compiles a library; the others wait and find it. The kernel frees the lock of a dead one."""
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
