"""What was made of a layer's tensors, kept while they live: a layer that is loaded again is not prepared again."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from moe_contract import ExpertWeights

LARGEST_KEPT = 2**24
"""Elements of the first tensor up to which results are kept: small layers are loaded again and again by tests, while
what is made of a real layer, on each of its ranks at once, would not fit beside it."""
_ONE_AT_A_TIME = threading.Lock()
"""Ranks of one process prepare large layers one after the other: padding multiplies a layer that is split."""
T = TypeVar("T")


class TensorCache(Generic[T]):
    """Results by the tensors that they were made of; forgotten with the first of them, and when one is written.

    Args:
        largest: elements of the first tensor up to which results are kept.
    """

    def __init__(self, largest: int = LARGEST_KEPT) -> None:
        self._largest = largest
        # By id: tensors as keys would be compared element by element.
        self._known: dict[int, tuple[weakref.ref[Tensor], object, T]] = {}

    def get(self, tensors: Sequence[Tensor | None], make: Callable[[], T]) -> T:
        """What ``make`` gives, made once. Ranks on threads may ask at once: each asks for its own tensors."""
        first = tensors[0]
        assert first is not None
        if first.numel() > self._largest:
            with _ONE_AT_A_TIME:
                return make()
        state = tuple(None if each is None else (id(each), each._version) for each in tensors)
        key = id(first)
        known = self._known.get(key)
        if known is not None and known[0]() is first and known[1] == state:
            return known[2]
        made = make()
        self._known[key] = (weakref.ref(first, lambda _: self._known.pop(key, None)), state, made)
        return made


class WeightCache(Generic[T]):
    """Prepared weights by the experts' own.

    Args:
        make: from canonical weights to prepared ones.
    """

    def __init__(self, make: Callable[[ExpertWeights], T]) -> None:
        self._make = make
        self._known: TensorCache[T] = TensorCache()

    def get(self, weights: ExpertWeights) -> T:
        """The prepared weights of these experts."""
        return self._known.get((weights.up, weights.down, weights.gate), lambda: self._make(weights))
