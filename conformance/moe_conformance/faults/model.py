"""What a planted fault is, and the registry that its decorators fill."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

from moe_contract import Consumer, Producer

Side = Literal["producer", "consumer", "engine"]


@dataclass(frozen=True)
class Patch:
    """One name of one module that an engine's wrong wiring takes the place of."""

    target: str
    """``package.module.name``, as unittest.mock.patch takes it."""
    replacement: Any


@dataclass(frozen=True)
class Planted:
    """Backends with the fault in them. A side that is None is played by the reference, in pairs."""

    producer: Producer | None = None
    consumer: Consumer | None = None
    patches: tuple[Patch, ...] = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Runs the body with the wrong wiring in place of the contract's own."""
        with ExitStack() as stack:
            for change in self.patches:
                stack.enter_context(patch(change.target, change.replacement))
            yield


@dataclass(frozen=True)
class Fault:
    """A backend that is wrong in one way."""

    id: str
    clause: str
    """The clause that it breaks, and that has to be blamed first."""
    what: str
    """One sentence."""
    side: Side
    family: str
    """The module that it is defined in."""
    plant: Callable[[], Planted]
    smallest: str = ""
    """The smallest case that shows it, in words; empty where any case does."""
    bugs: tuple[str, ...] = ()
    """Public reports that it expresses, such as ``vllm#46408``: keys of known_bugs.KNOWN_BUGS."""
    needs: str = ""
    """What a machine has to have for it to run: ``cuda``, or nothing."""


@dataclass(frozen=True)
class Variant:
    """A backend that is unusual and right: nothing of it may be blamed."""

    id: str
    what: str
    family: str
    plant: Callable[[], Planted]


class CatalogueError(ValueError):
    """Two faults of one id, or one without a sentence; the message is one line."""


def name_of(thing: Any) -> str:
    """The id of a fault: its class's or function's name in kebab case."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "-", thing.__name__.strip("_"))
    return spaced.replace("_", "-").lower()


def sentence_of(thing: Any) -> str:
    """The first sentence of its docstring; raises CatalogueError where there is none."""
    text = " ".join((thing.__doc__ or "").split())
    if not text:
        raise CatalogueError(
            f"{thing.__module__}.{thing.__name__}: a fault's docstring says what is wrong in a sentence"
        )
    return text


def family_of(thing: Any) -> str:
    """The last part of the module's name."""
    return str(thing.__module__).rpartition(".")[2]
