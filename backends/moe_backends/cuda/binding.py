"""apache-tvm-ffi, through which the CUDA consumer's library is called: where its headers and its library are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

from moe_contract import UnsupportedError


@dataclass(frozen=True)
class Binding:
    """Where apache-tvm-ffi lies and which version it is."""

    version: str
    include_dirs: tuple[str, ...]
    library: str


@lru_cache(maxsize=1)
def find_binding() -> Binding:
    """apache-tvm-ffi's headers and library.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        from tvm_ffi import libinfo

        found = version("apache-tvm-ffi")
    except (ImportError, PackageNotFoundError):
        raise UnsupportedError("apache-tvm-ffi is missing: pip install 'moe-conformance[cuda]'") from None
    includes = tuple(dict.fromkeys((libinfo.find_include_path(), libinfo.find_dlpack_include_path())))
    return Binding(found, includes, libinfo.find_libtvm_ffi())
