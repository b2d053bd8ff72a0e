"""What was made of parts of large tensors, those used last."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from torch import Tensor

KEPT_ELEMENTS = 2**29
"""Elements that are kept: 1 GB in 16 bits."""
T = TypeVar("T")
Key = tuple[int, Hashable]


class Recent(Generic[T]):
    """Results by the tensor that they were made of and a key, as long as that tensor lives and there is room.

    Args:
        size: elements of a result.
        most: elements that are kept, at least one result.
    """

    def __init__(self, size: Callable[[T], int], most: int = KEPT_ELEMENTS) -> None:
        self._size, self._most = size, most
        self._lock = threading.Lock()
        self._known: OrderedDict[Key, tuple[weakref.ref[Tensor], T]] = OrderedDict()
        self._elements = 0

    def get(self, owner: Tensor, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` gives, made once. The key is kept, so that objects in it are compared while they live."""
        full = (id(owner), key)
        with self._lock:
            known = self._known.get(full)
            if known is not None and known[0]() is owner:
                self._known.move_to_end(full)
                return known[1]
        made = make()
        with self._lock:
            self._drop(full)
            for dead in [each for each, (of, _) in self._known.items() if of() is None]:
                self._drop(dead)
            self._known[full] = (weakref.ref(owner), made)
            self._elements += self._size(made)
            while self._elements > self._most and len(self._known) > 1:
                self._drop(next(iter(self._known)))
        return made

    def _drop(self, key: Key) -> None:
        if (known := self._known.pop(key, None)) is not None:
            self._elements -= self._size(known[1])
