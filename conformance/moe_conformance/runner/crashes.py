"""What ended a worker process, in words for the author of the backend that it was running."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

WAIT_S = 5.0
"""Longest wait for the exit status of a process whose pipe is closed already."""


def exit_status(node: Any) -> int | None:
    """The exit status of an xdist worker's process; negative for a signal, None when it cannot be known."""
    process = getattr(getattr(getattr(node, "gateway", None), "_io", None), "popen", None)
    if not isinstance(process, subprocess.Popen):
        return None
    try:
        return process.wait(timeout=WAIT_S)
    except subprocess.TimeoutExpired:
        return None


def describe(status: int | None, elapsed_s: float | None, limit_s: float) -> str:
    """One line: why the worker ended while it ran a case.

    Args:
        status: as exit_status gives it.
        elapsed_s: how long the case had been running; None when unknown.
        limit_s: the watchdog's limit. It ends a worker whose interpreter is held with exit status 1.
    """
    if status == 1 and elapsed_s is not None and elapsed_s >= limit_s:
        return f"hangs: no result after {elapsed_s:.0f} s and the interpreter is held; its worker process was ended"
    return f"crashed: its worker process ended ({_cause(status)}) while running this case"


def _cause(status: int | None) -> str:
    if status is None:
        return "exit status unknown"
    if status < 0:
        return f"signal {_signal_name(-status)}"
    return f"exit status {status}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
