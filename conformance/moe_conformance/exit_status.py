"""The exit statuses of every command."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """How a command ended, for scripts."""

    HOLDS = 0
    """Everything that ran is as it should be."""
    BROKEN = 1
    """A clause is broken, a fault survived, a result is wrong, or a call would not bind."""
    UNUSABLE = 2
    """Wrong usage, an error of the suite, or planned cases that did not run."""
    NOTHING_RAN = 3
    """Nothing could be judged."""
    INTERRUPTED = 130
    """128 plus SIGINT, as shells give it."""
