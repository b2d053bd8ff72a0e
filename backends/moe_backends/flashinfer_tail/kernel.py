"""One call of FlashInfer's kernel, and what either way to it has to offer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .plan import Shape


@dataclass(frozen=True)
class Call:
    """One rank's part of a call; every tensor dense, on one device, 16-byte aligned.

    Attributes:
        table: of the workspace.
        rank, ranks: own and all.
        rows: ``[P, H]``.
        weights: ``[T, K]``, activation dtype; None adds the rows as they are.
        index: ``[T, K]`` int32.
        shared: ``[T, H]`` or None.
        residual: ``[T, H]``; gives T, at least 1.
        norm_weight: ``[H]``, activation dtype.
        residual_out, norm_out: ``[T, H]``, written.
        scale: routed scaling factor.
        eps, weight_bias: of the norm.
        pdl: programmatic dependent launch.
    """

    table: Tensor
    rank: int
    ranks: int
    rows: Tensor
    weights: Tensor | None
    index: Tensor
    shared: Tensor | None
    residual: Tensor
    norm_weight: Tensor
    residual_out: Tensor
    norm_out: Tensor
    scale: float
    eps: float
    weight_bias: float
    pdl: bool


class Kernel(Protocol):
    """The kernel for one dtype and rank count, loaded on the current device."""

    way: str
    """``header`` or ``package``."""
    max_cluster: int
    """Blocks of the largest cluster that the current device runs of it."""

    def resident(self, shape: Shape) -> int:
        """Clusters of this shape that the current device holds at a time."""
        ...

    def run(self, call: Call) -> None:
        """Launches on torch's current stream.

        Raises:
            RuntimeError: the launch was refused.
        """
        ...
