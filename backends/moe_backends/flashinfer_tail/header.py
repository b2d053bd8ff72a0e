"""The first way: FlashInfer's header alone, compiled behind C functions (kernels/launch.cu) and called by ctypes."""

from __future__ import annotations

import ctypes
import threading
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_int32, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from moe_backends.jit.toolchain import architecture_of
from moe_contract import UnsupportedError
from moe_contract.dtypes import dtype_name

from .build import DTYPES, library_path
from .kernel import Call
from .plan import Shape


class _Call(ctypes.Structure):
    """struct Call in kernels/launch.cu."""

    _fields_ = (
        *((name, c_void_p) for name in ("table", "rows", "weights", "map", "shared", "residual", "gamma")),
        *((name, c_void_p) for name in ("residual_out", "norm_out", "stream")),
        *((name, c_int32) for name in ("dtype", "ranks", "rank", "tokens", "hidden", "top_k", "pdl")),
        *((name, c_float) for name in ("scale", "eps", "weight_bias")),
    )


_FUNCTIONS = {
    "moe_flashinfer_load": (c_int32, c_int32, POINTER(c_int32)),
    "moe_flashinfer_resident": (c_int32, c_int32, c_int32, c_int32, POINTER(c_int32)),
    "moe_flashinfer_run": (POINTER(_Call),),
}
_libraries: dict[Path, ctypes.CDLL] = {}
_lock = threading.Lock()


def open_library(path: Path) -> ctypes.CDLL:
    """The library with its functions declared; they release the interpreter lock while they run.

    Raises:
        UnsupportedError: it cannot be loaded, or is not ours.
    """
    with _lock:
        if path not in _libraries:
            try:
                library = ctypes.CDLL(str(path))
                for name, arguments in _FUNCTIONS.items():
                    function = getattr(library, name)
                    function.argtypes, function.restype = arguments, c_int
                library.moe_flashinfer_failure.restype = c_char_p
            except (OSError, AttributeError) as error:
                raise UnsupportedError(f"{path.name} cannot be loaded: {error}") from error
            _libraries[path] = library
        return _libraries[path]


class HeaderKernel:
    """The kernel of one dtype and rank count in a library of ours."""

    way = "header"

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, ranks: int) -> None:
        """Loads the kernel on the current device.

        Raises:
            UnsupportedError: this device cannot run it.
        """
        self._library, self._dtype, self._ranks = library, DTYPES[dtype_name(dtype)], ranks
        largest = c_int32()
        if library.moe_flashinfer_load(self._dtype, ranks, byref(largest)):
            raise UnsupportedError(self._failure())
        self.max_cluster = int(largest.value)

    def resident(self, shape: Shape) -> int:
        """Asks the driver."""
        count = c_int32()
        if self._library.moe_flashinfer_resident(self._dtype, self._ranks, shape.cluster, shape.threads, byref(count)):
            raise UnsupportedError(self._failure())
        return int(count.value)

    def run(self, call: Call) -> None:
        """Launches. Raises RuntimeError with the launcher's or CUDA's words."""
        tokens, hidden = call.residual.shape
        addresses = (
            call.table, call.rows, call.weights, call.index, call.shared, call.residual, call.norm_weight,
            call.residual_out, call.norm_out,
        )  # fmt: skip
        given = _Call(
            *map(_address, addresses), torch._C._cuda_getCurrentRawStream(call.residual.device.index),
            self._dtype, call.ranks, call.rank, tokens, hidden, call.index.shape[1], call.pdl,
            call.scale, call.eps, call.weight_bias,
        )  # fmt: skip
        with torch.cuda.device(call.residual.device):
            failed = self._library.moe_flashinfer_run(byref(given))
        if failed:
            raise RuntimeError(f"flashinfer-fused: {self._failure()}")

    def _failure(self) -> str:
        text: bytes = self._library.moe_flashinfer_failure()
        return text.decode()


def open_kernel(dtype: torch.dtype, ranks: int, device: torch.device) -> HeaderKernel:
    """Builds the library if need be and loads the kernel on the device.

    Raises:
        UnsupportedError: this machine cannot build or run it; one line.
    """
    library = open_library(library_path(architecture_of(device)))
    with torch.cuda.device(device):
        return HeaderKernel(library, dtype, ranks)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
