"""Finding backends: by entry point name, or by ``module:object``."""

from __future__ import annotations

import difflib
import importlib
import sys
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Literal

from moe_contract.backend import Backend, Consumer, Producer

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
        BackendNotFoundError: unknown name (the nearest known one is suggested), failed import, or an object that is
            neither a producer nor a consumer.
    """
    point = installed_backends().get(name)
    try:
        if point is not None:
            found = point.load()
        elif ":" in name:
            found = _import_object(name)
        else:
            raise BackendNotFoundError(_unknown(name))
    except BackendNotFoundError:
        raise
    except Exception as error:
        raise BackendNotFoundError(
            f"backend {name!r} could not be imported: {type(error).__name__}: {error}"
        ) from error
    return _as_backend(name, found)


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
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    found: object = importlib.import_module(module_name)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found


def _unknown(name: str) -> str:
    known = sorted(installed_backends())
    near = difflib.get_close_matches(name, known, n=1)
    suggestion = f"; did you mean {near[0]!r}?" if near else ""
    listing = ", ".join(known) or "none"
    return f"unknown backend {name!r}{suggestion} (installed: {listing}; or give module:object)"


def _as_backend(name: str, found: object) -> Backend:
    if isinstance(found, Backend):
        return found
    if isinstance(found, type):
        found = found()
    has_declaration = hasattr(found, "declaration")
    as_producer = found if has_declaration and isinstance(found, Producer) else None
    as_consumer = found if has_declaration and isinstance(found, Consumer) else None
    if as_producer is None and as_consumer is None:
        raise BackendNotFoundError(
            f"backend {name!r} is a {type(found).__name__}; expected an object with 'declaration' and 'load' "
            "(producer) or 'open' (consumer), such as @producer and @consumer make"
        )
    return Backend(producer=as_producer, consumer=as_consumer)
