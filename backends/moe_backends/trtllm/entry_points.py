"""What the adapters call: FlashInfer as it is installed, or something that stands in for it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cached_property
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_contract import ExpertWeights, Installation

from .bindings import problems
from .returns import Entry
from .sources import read_installed
from .versions import EMULATED, NEWEST, OLDEST, Version, known

DISTRIBUTION = "flashinfer-python"
MAJOR = 10
"""Compute capability 10.x, which the TRTLLM-Gen kernels are built for."""


class Prepares(Protocol):
    """A weight format, as far as entry points need it."""

    def prepare(self, weights: ExpertWeights) -> Mapping[str, object]:
        """The weights' keywords."""
        ...


class EntryPoints(Protocol):
    """The entry points of one FlashInfer version."""

    @property
    def version(self) -> Version:
        """Which version it is, or behaves as."""
        ...

    def unavailable(self, device: torch.device) -> str:
        """Why it cannot run on ``device``, in one phrase; empty where it can."""
        ...

    def installation(self) -> Installation:
        """What is installed, and which calls of the adapters it would not take."""
        ...

    def on_demand(self, weights: ExpertWeights, weight_format: Prepares) -> Mapping[str, object] | None:
        """Keywords in place of prepared weights, for entry points that ask for each expert's; None to prepare them."""
        ...

    def call(self, entry: Entry, arguments: Mapping[str, object]) -> object:
        """Calls an entry point by keyword; what it returns, untouched."""
        ...

    def quantize(self, hidden_states: Tensor, global_scale: float) -> tuple[Tensor, Tensor]:
        """NVFP4 codes ``[T, H / 2]`` uint8 and linear block scales ``[T, H / 16]`` float8_e4m3fn of ``[T, H]``."""
        ...


class FlashInfer:
    """The installed package. Constructing it imports nothing."""

    @cached_property
    def version(self) -> Version:
        """The installed version; where none is, or its text is not understood, the one that docs are written for."""
        try:
            return Version.parse(installed_version(DISTRIBUTION))
        except (PackageNotFoundError, ValueError):
            return EMULATED

    def unavailable(self, device: torch.device) -> str:
        """Why the kernels cannot run here: the package, its version, the device. Never an abort of the process."""
        if importlib.util.find_spec("flashinfer") is None:
            return f"flashinfer is not installed (pip install {DISTRIBUTION})"
        try:
            installed = Version.parse(installed_version(DISTRIBUTION))
        except (PackageNotFoundError, ValueError) as error:
            return f"flashinfer is present, but its version cannot be told: {error}"
        if not known(installed):
            return f"flashinfer {installed} is not one of the versions {OLDEST} to {NEWEST} whose forms are known"
        if device.type != "cuda":
            return f"the kernels run on cuda, not on {device.type}"
        if not torch.cuda.is_available():
            return "torch sees no GPU"
        major, minor = torch.cuda.get_device_capability(device)
        if major != MAJOR:
            return f"TRTLLM-Gen kernels need compute capability {MAJOR}.x; this GPU has {major}.{minor}"
        return self._import_problem()

    def installation(self) -> Installation:
        """Read from the installed sources, which nothing of is imported."""
        spec = importlib.util.find_spec("flashinfer")
        if spec is None or not spec.submodule_search_locations:
            return Installation(DISTRIBUTION, "")
        found = read_installed(Path(spec.submodule_search_locations[0]))
        wrong = [] if known(self.version) else [f"its forms are not known ({OLDEST} to {NEWEST} are)"]
        return Installation(DISTRIBUTION, str(self.version), (*wrong, *problems(self.version, found)))

    def on_demand(self, weights: ExpertWeights, weight_format: Prepares) -> None:
        """Kernels read the weights of every expert."""

    def call(self, entry: Entry, arguments: Mapping[str, object]) -> object:
        """Calls ``flashinfer.fused_moe``'s function of this name."""
        function: Callable[..., object] = getattr(self._modules[0], entry.value)
        return function(**arguments)

    def quantize(self, hidden_states: Tensor, global_scale: float) -> tuple[Tensor, Tensor]:
        """FlashInfer's own quantiser, in the linear layout that the MoE entry points take."""
        scale = torch.full((1,), global_scale, dtype=torch.float32, device=hidden_states.device)
        codes, scales = self._modules[1].fp4_quantize(
            hidden_states, scale, sf_vec_size=16, sf_use_ue8m0=False, is_sf_swizzled_layout=False
        )
        tokens, width = hidden_states.shape
        return codes.view(torch.uint8), scales.view(torch.float8_e4m3fn).reshape(tokens, width // 16)

    @cached_property
    def _modules(self) -> tuple[Any, Any]:
        return importlib.import_module("flashinfer.fused_moe"), importlib.import_module("flashinfer")

    def _import_problem(self) -> str:
        # Whatever an import of CUDA code raises, linker errors included, is a reason, not a crash.
        try:
            _ = self._modules
        except Exception as error:
            return f"flashinfer {self.version} cannot be imported: {type(error).__name__}: {error}"
        return ""
