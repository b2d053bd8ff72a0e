"""What a run changes in its process for as long as pytest runs, and puts back."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SET = {
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # the user's other pytest plugins are not part of the suite
    "OMP_NUM_THREADS": "1",  # read when a worker imports torch: workers times threads would exceed the cores
    # A kernel that is loaded at its first launch may wait for a device on which a peer's kernel already waits for it.
    "CUDA_MODULE_LOADING": "EAGER",
}
REMOVED_PREFIX = "PYTEST_"
"""The user's own settings, such as PYTEST_ADDOPTS, and those of an outer pytest run."""


class Stopped(KeyboardInterrupt):
    """SIGTERM, treated as Ctrl-C is."""


@contextmanager
def suite_environment() -> Iterator[None]:
    """The environment variables that workers inherit."""
    before = dict(os.environ)
    for name in before:
        if name.startswith(REMOVED_PREFIX):
            del os.environ[name]
    os.environ.update(SET)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def quiet_stderr(echo: bool) -> Iterator[None]:
    """Sends file descriptor 2 of this process and its workers to a file.

    Crash dumps of workers and what backends print would otherwise run through the progress bar. ``echo`` (-v) shows
    the text afterwards.
    """
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            if echo:
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace"))
                sys.stderr.flush()


@contextmanager
def stops_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM end the run as Ctrl-C does, so that what there is gets reported."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may install handlers; an embedding program keeps its own
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
