"""Finding backends: by entry point name, or by ``module:object``."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Literal

from moe_contract.backend import Backend, Consumer, Producer
from moe_contract.declarations import ConsumerDeclaration, ProducerDeclaration
from moe_contract.places import place_of_error
from moe_contract.plugin_errors import PlugInError, nearest
from moe_contract.signatures import Arguments, require_takes

ENTRY_POINT_GROUP = "moe_conformance.backends"
Side = Literal["producer", "consumer"]


class BackendNotFoundError(LookupError):
    """No backend of this name, or it could not be imported; the message is one line for the user."""


def installed_backends() -> dict[str, EntryPoint]:
    """Entry points by name. Nothing is imported."""
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}


def load_backend(name: str) -> Backend:
    """The backend called ``name``, or at ``module:object`` (the current folder is searched too).

    Raises:
        BackendNotFoundError: unknown name (the nearest known one is suggested), failed import (with the plug-in's file
            and line), or an object that is neither a producer nor a consumer.
    """
    point = installed_backends().get(name)
    if point is None and ":" not in name:
        raise BackendNotFoundError(_unknown(name))
    try:
        found = point.load() if point is not None else _import_object(name)
        if isinstance(found, type):
            require_takes(found, Arguments())
            found = found()
        return _as_backend(name, found)
    except BackendNotFoundError:
        raise
    except (Exception, SystemExit) as error:
        raise BackendNotFoundError(f"backend {name!r} could not be imported: {_what_went_wrong(error)}") from error


def load_producer(name: str) -> Producer:
    """The producer of backend ``name``; raises BackendNotFoundError."""
    found = load_backend(name).producer
    if found is None:
        raise BackendNotFoundError(f"backend {name!r} has no producer, only a consumer")
    return found


def load_consumer(name: str) -> Consumer:
    """The consumer of backend ``name``; raises BackendNotFoundError."""
    found = load_backend(name).consumer
    if found is None:
        raise BackendNotFoundError(f"backend {name!r} has no consumer, only a producer")
    return found


def _import_object(name: str) -> object:
    module_name, _, attribute = name.partition(":")
    _require_module_name(name, module_name, attribute)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: object = importlib.import_module(module_name)
    path = f"{module_name}:"
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise BackendNotFoundError(_no_attribute(name, found, path, part))
        found = getattr(found, part)
        path += f"{part}."
    return found


def _require_module_name(name: str, module_name: str, attribute: str) -> None:
    """Refuses a file in place of a module, and halves that are missing."""
    stem = module_name.removesuffix(".py")
    if "/" in module_name or stem != module_name:
        folder, _, module = stem.rpartition("/")
        where = f", run in the folder {folder}" if folder else ""
        raise BackendNotFoundError(
            f"backend {name!r}: expected the name of a module, got that of a file; write "
            f"{module}:{attribute or 'object'}{where}"
        )
    if not module_name or not attribute:
        raise BackendNotFoundError(f"backend {name!r}: expected module:object, such as mine:tail for tail in mine.py")


def _no_attribute(name: str, parent: object, path: str, wrong: str) -> str:
    backends = sorted(
        attribute
        for attribute, value in getattr(parent, "__dict__", {}).items()
        if not attribute.startswith("_") and (isinstance(value, Backend) or hasattr(value, "declaration"))
    )
    suggestion = nearest(wrong, backends).replace("did you mean '", f"did you mean '{path}")
    listing = f"its backends: {', '.join(backends)}" if backends else "it holds no backend, see moe_contract.consumer"
    return f"backend {name!r}: {path.rstrip(':.')} has no {wrong!r}{suggestion} ({listing})"


def _what_went_wrong(error: BaseException) -> str:
    """One line with the place in the plug-in, and where a module is not found, where it was looked for."""
    text = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
    if isinstance(error, PlugInError):
        return text
    if isinstance(error, SystemExit):
        text = f"it ended the program ({error.code})"
    else:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = place_of_error(error)
    if not place and isinstance(error, ModuleNotFoundError):
        return f"{text} (looked in the current folder and among the installed packages)"
    return f"{place}: {text}" if place else text


def _unknown(name: str) -> str:
    known = sorted(installed_backends())
    listing = ", ".join(known) or "none"
    module = name.removesuffix(".py")
    file = Path(f"{module}.py")
    here = f"; {file} is a file here: name its object, as {module}:object" if name and file.is_file() else ""
    return f"unknown backend {name!r}{here or nearest(name, known)} (installed: {listing}; or give module:object)"


def _as_backend(name: str, found: object) -> Backend:
    whole = isinstance(found, Backend)
    producer = found.producer if isinstance(found, Backend) else _having("load", found)
    consumer = found.consumer if isinstance(found, Backend) else _having("open", found)
    if (producer is None and consumer is None) or not (whole or hasattr(found, "declaration")):
        raise BackendNotFoundError(
            f"backend {name!r} is a {type(found).__name__}; expected an object with 'declaration' and 'load' "
            "(producer) or 'open' (consumer), such as @producer and @consumer make"
        )
    _require_side(name, producer, "load", ProducerDeclaration)
    _require_side(name, consumer, "open", ConsumerDeclaration)
    return Backend(producer, consumer)


def _having(method: str, found: object) -> Any:
    return found if callable(getattr(found, method, None)) else None


def _require_side(name: str, side: object, method: str, expected: type) -> None:
    if side is None:
        return
    what, declared = type(side).__name__, getattr(side, "declaration", None)
    if not callable(getattr(side, method, None)):
        raise BackendNotFoundError(f"backend {name!r}: its {what} has no method {method}()")
    if not isinstance(declared, expected):
        raise BackendNotFoundError(
            f"backend {name!r}: its {what} has {method}() and a declaration that is a {type(declared).__name__}; "
            f"expected a moe_contract.{expected.__name__}"
        )
