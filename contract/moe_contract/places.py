"""Where in a plug-in's own code something is or went wrong, as ``acme.py:12``: the place its author has to look at."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from types import CodeType, FrameType, TracebackType

OURS = frozenset({"moe_contract", "moe_conformance"})
"""Top-level packages whose frames call a plug-in and are never the place of its mistake."""
BETWEEN = frozenset(
    {"torch", "pydantic", "contextlib", "functools", "importlib", "threading", "_pytest", "pluggy", "xdist"}
)
"""Packages that stand between the suite and a plug-in, such as an import or a compiled call."""
INSTALLED = "site-packages"
"""The folder in which packages of different authors lie beside one another."""
Frame = tuple[FrameType, int]
"""A frame and the line it was at."""


def place_of_error(error: BaseException) -> str:
    """The innermost line of the plug-in that an exception came through; empty where it came through none.

    The plug-in is the code of the first frame that is neither the suite's nor the machinery's: an error that torch
    raises is placed at the plug-in's call of torch.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno or 0}"
    return _innermost(_frames(error.__traceback__))


def place_of_caller() -> str:
    """The innermost line of the plug-in that is running now; empty where none is."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _package(frame) in OURS | BETWEEN:
        frame = frame.f_back
    return _text((frame, frame.f_lineno)) if frame is not None else ""


def place_of_callable(function: object) -> str:
    """The line where a function, a method or a class's ``__call__`` is defined; empty for compiled code."""
    code = _code(function)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""


def _code(function: object) -> CodeType | None:
    while isinstance(function, functools.partial):
        function = function.func
    if isinstance(function, type):
        function = function.__init__  # type: ignore[misc]  # only its code is read
    elif not (inspect.isroutine(function) or hasattr(function, "__code__")):
        function = inspect.getattr_static(type(function), "__call__", None)
    code = getattr(inspect.unwrap(function) if callable(function) else None, "__code__", None)
    return code if isinstance(code, CodeType) else None


def _frames(trace: TracebackType | None) -> list[Frame]:
    found: list[Frame] = []
    while trace is not None:
        found.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    return found


def _innermost(frames: list[Frame]) -> str:
    first = next((frame for frame, _ in frames if _package(frame) not in OURS | BETWEEN), None)
    if first is None:
        return ""
    return _text([at for at in frames if _belong_together(first, at[0])][-1])


def _belong_together(first: FrameType, other: FrameType) -> bool:
    """Whether both are code of one plug-in: of one package, or of modules that lie beside one another."""
    if _package(first) == _package(other):
        return True
    folder, file = Path(first.f_code.co_filename).parent, Path(other.f_code.co_filename)
    return INSTALLED not in file.parts and file.is_relative_to(folder) and _package(other) not in OURS | BETWEEN


def _package(frame: FrameType) -> str:
    if frame.f_code.co_filename.startswith("<frozen "):
        return "importlib"
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _text(at: Frame) -> str:
    frame, line = at
    return f"{Path(frame.f_code.co_filename).name}:{line}"
