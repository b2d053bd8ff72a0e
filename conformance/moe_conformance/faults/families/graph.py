"""GRAPH: capture and compilation."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_conformance.faults import plain_tail
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)


@consumer_fault("GRAPH-1", bugs=("vllm#55973",), needs="cuda", smallest="one captured call")
class SynchronisesWhileCapturing(PlainTail):
    """A value is read on the host during the call, which invalidates a capture."""

    def local(self, output):  # type: ignore[no-untyped-def]  # as the base's
        """Reads one."""
        local = super().local(output)
        self.kept["peak"] = float(local.abs().amax()) if local.numel() else 0.0
        return local


@consumer_fault("GRAPH-1", bugs=("vllm-ascend#10557",), needs="cuda", smallest="two replays with other inputs")
class FrozenAtCapture(PlainTail):
    """What the first captured call computed is handed out by every replay."""

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """The captured residual, kept."""
        if torch.cuda.is_current_stream_capturing():
            frozen: Tensor = self.kept["first"].clone()
            return frozen
        fresh = self.kept["first"] = super().add_residual(total, residual)
        return fresh


class _Compilable(PlainTail):
    """Declares that torch.compile can trace it."""

    declares: ClassVar[dict[str, Any]] = {"compilable": True}


@consumer_fault("GRAPH-2", smallest="one traced call")
class GraphBreaks(_Compilable):
    """A branch on a tensor's value breaks the graph."""

    def scale(self, routed: Tensor, factor: float) -> Tensor:
        """Skips the multiplication of zeros."""
        return super().scale(routed, factor) if routed.abs().sum().item() > 0 else routed


@consumer_fault("GRAPH-2", bugs=("vllm-ascend#10557",), smallest="one traced call, factor 2.5")
class TracedWithoutTheFactor(_Compilable):
    """The traced specialisation leaves the routed scaling factor out."""

    def scale(self, routed: Tensor, factor: float) -> Tensor:
        """Depends on who is looking."""
        return routed if torch.compiler.is_compiling() else super().scale(routed, factor)
