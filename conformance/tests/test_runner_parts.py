"""The pieces of the runner that need no worker process."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from moe_conformance.plan import PlanRequest
from moe_conformance.runner import Shard, ShardError
from moe_conformance.runner.crashes import describe
from moe_conformance.runner.given_up import MOST_STRIKES, Backends, Strikes, read
from moe_conformance.runner.run import FEW_CASES, default_workers, pytest_arguments


def test_shards_hold_every_id_once() -> None:
    """Together they are the whole; none is empty."""
    ids = [f"test_map.py::test_x[reference:T{number}]" for number in range(200)]
    parts = [[name for name in ids if Shard(index, 3).holds(name)] for index in (1, 2, 3)]
    assert sorted(name for part in parts for name in part) == sorted(ids)
    assert all(len(part) > 30 for part in parts)


def test_shard_of_an_id_is_the_same_on_every_machine() -> None:
    """A fixed id has a fixed shard, whatever Python's own hash seed is."""
    holders = [index for index in (1, 2, 3, 4) if Shard(index, 4).holds("test_map.py::test_x[reference:T1]")]
    assert holders == [4]
    assert Shard.parse("1/1").holds("anything")


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/0", "-1/4", "1/4/2"])
def test_impossible_shard_is_refused(text: str) -> None:
    """With a line that shows what was given."""
    with pytest.raises(ShardError, match=text):
        Shard.parse(text)


@pytest.mark.parametrize(
    ("status", "elapsed", "expected"),
    [
        (-signal.SIGSEGV, 0.1, "signal SIGSEGV"),
        (7, 0.1, "exit status 7"),
        (1, 0.1, "exit status 1"),
        (1, 91.0, "hangs: no result after 91 s"),
        (None, None, "exit status unknown"),
    ],
)
def test_crash_is_described_by_its_cause(status: int | None, elapsed: float | None, expected: str) -> None:
    """Signals by name, exits by status, the watchdog's as a hang."""
    assert expected in describe(status, elapsed, limit_s=90.0)


def test_backend_is_given_up_after_some_strikes_and_with_it_its_pairs(tmp_path: Path) -> None:
    """Another backend is not."""
    strikes = Strikes(tmp_path / "given-up")
    bad = Backends(None, "bad")
    for _ in range(MOST_STRIKES - 1):
        strikes.add(bad)
    assert read(tmp_path / "given-up") == set() and strikes.reason(bad) == ""
    strikes.add(bad)
    assert read(tmp_path / "given-up") == {bad}
    assert "bad" in strikes.reason(Backends("good", "bad"))
    assert strikes.reason(Backends("good", "other")) == ""


def test_pair_that_crashes_does_not_give_up_its_sides(tmp_path: Path) -> None:
    """Which of the two is at fault is not known."""
    strikes = Strikes(tmp_path / "given-up")
    for _ in range(MOST_STRIKES):
        strikes.add(Backends("p", "c"))
    assert read(tmp_path / "given-up") == {Backends("p", "c")}
    assert strikes.reason(Backends(None, "c")) == "" and strikes.reason(Backends("p", "other")) == ""


def test_few_cases_take_one_worker() -> None:
    """More workers would only import torch more often."""
    assert default_workers(FEW_CASES - 1, PlanRequest()) == 1
    assert 1 <= default_workers(10_000, PlanRequest(device="cuda")) <= 4


def test_real_models_take_a_worker_for_each_core_at_most() -> None:
    """Each worker holds a layer of gigabytes; other profiles have more workers than cores."""
    cores = len(os.sched_getaffinity(0))
    assert default_workers(10_000, PlanRequest(profile="model:qwen3-30b-a3b")) == cores
    assert default_workers(10_000, PlanRequest()) == cores + cores // 2


def test_request_reaches_the_workers_unchanged() -> None:
    """The options that the workers parse give the request that the plan was made from."""
    from moe_conformance import plugin
    from moe_conformance.runner import worker

    request = PlanRequest(
        producers=("a", "m:b"), consumers=("c",), profile="smoke", ranks=(1, 2), clauses=("MAP-4",), seed=5,
        partners=("producer:a",),
    )  # fmt: skip
    parser = pytest.Parser(_ispytest=True)
    plugin.pytest_addoption(parser)
    worker.pytest_addoption(parser)
    arguments = pytest_arguments(request, Shard(1, 2), 1, 9.0)
    moe = [part for part in arguments[arguments.index("--moe-profile") :]]
    namespace = parser.parse(moe)

    class Config:
        @staticmethod
        def getoption(name: str) -> object:
            return getattr(namespace, name.removeprefix("--").replace("-", "_"))

    assert plugin.request_of(Config()) == request  # type: ignore[arg-type]  # only getoption is used
    assert (namespace.moe_shard, namespace.moe_timeout) == ("1/2", 9.0)
