"""The points of a bench: the product of the options, without what makes no sense."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

from moe_conformance.bench.model import Cache, Mode, Point


@dataclass(frozen=True)
class Grid:
    """What to time. Defaults: the sizes of Kimi-K2 and DeepSeek-V3 decode batches, one rank and two."""

    tokens: tuple[int, ...] = (1, 2, 8, 16, 64, 128, 512, 1024)
    hidden_sizes: tuple[int, ...] = (7168,)
    top_ks: tuple[int, ...] = (8,)
    ranks: tuple[int, ...] = (1, 2)
    dtypes: tuple[Literal["bfloat16", "float16"], ...] = ("bfloat16",)
    modes: tuple[Mode, ...] = tuple(Mode)
    caches: tuple[Cache, ...] = tuple(Cache)

    def points(self) -> list[Point]:
        """One rank has nobody to wait for, so it is timed in solo mode only."""
        sizes = product(self.ranks, self.modes, self.hidden_sizes, self.top_ks, self.dtypes, self.tokens, self.caches)
        return [
            Point(mode=mode, cache=cache, tokens=tokens, hidden_size=hidden, top_k=top_k, ranks=ranks, dtype=dtype)
            for ranks, mode, hidden, top_k, dtype, tokens, cache in sizes
            if ranks > 1 or mode is Mode.SOLO
        ]
