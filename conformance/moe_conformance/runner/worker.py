"""The runner's pytest plugin in the workers: leaves out cases of other shards and of given-up backends."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_conformance.runner.given_up import Backends, read
from moe_conformance.runner.sharding import Shard


def pytest_addoption(parser: pytest.Parser) -> None:
    """What the controller hands on to the workers."""
    group = parser.getgroup("moe-conformance")
    group.addoption("--moe-shard", metavar="I/N", help="run only this part of the cases")
    group.addoption("--moe-given-up", metavar="FILE", help="backends whose remaining cases are left out")


def pytest_configure(config: pytest.Config) -> None:
    """Native tracebacks: pytest's own parse the source files again for each case that fails or is unsupported, which
    took a third of a run. (The option itself belongs to the terminal, which a run leaves out.)"""
    config.option.tbstyle = "native"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drops the cases of other shards."""
    text = config.getoption("--moe-shard")
    if text is None:
        return
    shard = Shard.parse(text)
    left_out = [item for item in items if not shard.holds(item.nodeid)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if shard.holds(item.nodeid)]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Runs nothing, and reports nothing, for a backend that was given up; the controller knows why."""
    file = item.config.getoption("--moe-given-up")
    given_up = read(Path(file)) if file else set()
    if given_up and given_up.intersection(_backends(item).parts):
        return True
    return None


def _backends(item: pytest.Item) -> Backends:
    """The backends in the item's parameter; none for a test without one."""
    callspec = getattr(item, "callspec", None)
    for value in callspec.params.values() if callspec is not None else ():
        if hasattr(value, "producer") and hasattr(value, "consumer"):
            return Backends(value.producer, value.consumer)
    return Backends(None, None)
