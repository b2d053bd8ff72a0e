"""Every fault and every correct variant, in the order of their files."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType, ModuleType

from moe_conformance.faults import families
from moe_conformance.faults.model import CatalogueError, Fault, Variant


@cache
def faults() -> Mapping[str, Fault]:
    """The planted faults by id; raises CatalogueError for two of one id."""
    found: dict[str, Fault] = {}
    for module in _modules():
        for fault in vars(module).get("FAULTS", ()):
            if fault.id in found:
                raise CatalogueError(f"two faults are called {fault.id}: in {found[fault.id].family}, {fault.family}")
            found[fault.id] = fault
    return MappingProxyType(found)


@cache
def variants() -> Mapping[str, Variant]:
    """The correct variants by id."""
    found = {variant.id: variant for module in _modules() for variant in vars(module).get("VARIANTS", ())}
    return MappingProxyType(found)


def _modules() -> list[ModuleType]:
    names = sorted(info.name for info in pkgutil.iter_modules(families.__path__))
    return [importlib.import_module(f"{families.__name__}.{name}") for name in names]
