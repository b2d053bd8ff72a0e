"""Weights of a large layer that are prepared expert by expert, when a call selects an expert.

Kernels are given every expert's weights. A test's batch reaches a few of a real model's hundreds, on each of several
ranks, and the kernels' padding multiplies a sharded layer, so the emulator asks for those that it computes with.
Preparation treats experts independently: each is what it would be among the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_backends.trtllm.entry_points import Prepares
from moe_backends.trtllm.weights.blocks import INTERMEDIATE_MULTIPLE, round_up
from moe_contract import ExpertWeights

LARGEST_WHOLE = 2**26
"""Elements of one padded projection of all experts up to which they are prepared at once, as kernels need them."""


def is_large(weights: ExpertWeights) -> bool:
    """Whether a layer is prepared on demand: by its size in the kernels' layout, which padding multiplies."""
    experts, intermediate, hidden = weights.up.shape
    return experts * round_up(intermediate, INTERMEDIATE_MULTIPLE) * hidden > LARGEST_WHOLE


@dataclass(frozen=True, eq=False)
class OnDemandWeights:
    """The experts of one rank and the format that prepares them."""

    weights: ExpertWeights
    weight_format: Prepares

    def expert(self, index: int) -> Mapping[str, object]:
        """The keywords of this expert alone: tensors begin with a dimension of 1."""
        return self.weight_format.prepare(self.weights.select(slice(index, index + 1)))

    def keywords(self) -> dict[str, object]:
        """The keywords of a call: an OnDemandTensor in place of each tensor."""
        experts = self.weights.up.shape[0]
        return {
            name: OnDemandTensor(self, (experts, *value.shape[1:])) if isinstance(value, Tensor) else value
            for name, value in self.expert(0).items()
        }

    @property
    def version(self) -> int:
        """Changes when a weight is written."""
        weights = self.weights
        return sum(each._version for each in (weights.up, weights.down, weights.gate) if each is not None)


@dataclass(frozen=True, eq=False)
class OnDemandTensor:
    """Stands for a prepared tensor in a call to the emulator."""

    source: OnDemandWeights
    dimensions: tuple[int, ...]

    @property
    def shape(self) -> torch.Size:
        """The shape of the tensor of all experts."""
        return torch.Size(self.dimensions)

    def is_contiguous(self) -> bool:
        """Each expert's part is checked where it is prepared."""
        return True
