"""Prepared weights by the layer's own: a layer that is loaded again is not prepared again."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from moe_contract import ExpertWeights

T = TypeVar("T")


class WeightCache(Generic[T]):
    """What ``make`` made of experts, as long as their ``up`` tensor lives and none of their weights is written.

    Args:
        make: from canonical weights to prepared ones.
    """

    def __init__(self, make: Callable[[ExpertWeights], T]) -> None:
        self._make = make
        # By id: tensors as keys would be compared element by element.
        self._known: dict[int, tuple[weakref.ref[Tensor], object, T]] = {}

    def get(self, weights: ExpertWeights) -> T:
        """The prepared weights of these experts. Ranks on threads may ask at once: each asks for its own part."""
        tensors = (weights.up, weights.down, weights.gate)
        state = tuple(None if each is None else (id(each), each._version) for each in tensors)
        key = id(weights.up)
        known = self._known.get(key)
        if known is not None and known[0]() is weights.up and known[1] == state:
            return known[2]
        prepared = self._make(weights)
        self._known[key] = (weakref.ref(weights.up, lambda _: self._known.pop(key, None)), state, prepared)
        return prepared
