"""A cache of one value that never holds two: a real layer's weights take a gigabyte."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Latest(Generic[Key, Value]):
    """The value made last. It is dropped before the next is made; functools.lru_cache would hold both meanwhile.

    Safe to ask from several ranks' threads.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entry: tuple[Key, Value] | None = None

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """The value of ``key``, made now unless it is the one made last."""
        with self._lock:
            if self._entry is None or self._entry[0] != key:
                self._entry = None
                self._entry = (key, make())
            return self._entry[1]

    def drop(self) -> None:
        """Forgets the value."""
        with self._lock:
            self._entry = None
