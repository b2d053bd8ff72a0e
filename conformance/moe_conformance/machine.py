"""What this machine offers to worker processes."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Cores that this process may use, which a container or taskset may have made fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
