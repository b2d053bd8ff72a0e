"""A rank whose peers never come: for timing one rank alone."""

from __future__ import annotations

import torch
from torch import Tensor


class SoloGroup:
    """Rank 0 of ``size`` ranks; its collectives return at once, as if every peer had sent what rank 0 sent."""

    def __init__(self, size: int, device: torch.device, timeout_s: float = 10.0) -> None:
        self.rank = 0
        self.size = size
        self.device = device
        self.timeout_s = timeout_s

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """``size`` times the tensor, added and rounded rank by rank."""
        total = tensor.clone()
        for _ in range(self.size - 1):
            total += tensor
        return total

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor, ``size`` times."""
        return [tensor.clone() for _ in range(self.size)]

    def barrier(self) -> None:
        """There is nobody to wait for."""

    def peer_memory(self, num_bytes: int) -> list[Tensor]:
        """A zeroed buffer for every rank, all on this device, so that what is sent to a peer has somewhere to go."""
        return [torch.zeros(num_bytes, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
