"""FlashInfer's versions, as far as the adapters know them."""

from __future__ import annotations

import re
from functools import total_ordering
from typing import NamedTuple

LAST = 10_000
"""Sorts after the number of any release candidate or post release."""


@total_ordering
class Version(NamedTuple):
    """A release such as ``0.6.18.post1``; a release candidate sorts before its release, a post release after it."""

    major: int
    minor: int
    micro: int
    pre: int = LAST
    """Number of the release candidate; a final release has none and sorts after all of them."""
    post: int = 0

    @classmethod
    def parse(cls, text: str) -> Version:
        """``0.6.18.post1`` and the like; a local part such as ``+cu130`` is ignored. ValueError for anything else."""
        found = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)(?:rc(\d+))?(?:\.?post(\d+))?(?:\.dev\d+)?(?:\+.*)?", text.strip())
        if found is None:
            raise ValueError(f"expected a FlashInfer version such as 0.6.18 or 0.6.18.post1, got {text!r}")
        major, minor, micro, pre, post = found.groups()
        return cls(int(major), int(minor), int(micro), LAST if pre is None else int(pre), int(post or 0))

    @property
    def with_posts(self) -> Version:
        """The end of a range that is to hold this release and every post release of it."""
        return self._replace(post=LAST)

    def __str__(self) -> str:
        candidate = "" if self.pre == LAST else f"rc{self.pre}"
        return f"{self.major}.{self.minor}.{self.micro}{candidate}{f'.post{self.post}' if self.post else ''}"


OLDEST = Version(0, 6, 6)
"""The oldest whose calls are known here: do_finalize for bfloat16 came with 0.6.5, checked wheels start at 0.6.6."""
NEWEST = Version(0, 7, 4)
"""The newest whose wheel was read; a newer one is refused until its forms are known."""
EMULATED = Version(0, 6, 18, post=1)
"""The version that the emulated backends behave as unless told otherwise."""


def known(version: Version) -> bool:
    """Whether the adapters know this version's calls and return forms."""
    return OLDEST <= version <= NEWEST.with_posts
