"""One run: from a plan to a report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from moe_conformance.cases.profiles import get_profile
from moe_conformance.machine import usable_cores
from moe_conformance.plan import PlannedCase, PlanRequest, plan
from moe_conformance.report.attribution import explain_failures
from moe_conformance.report.environment import environment
from moe_conformance.report.model import BackendRecord, Report, Selection
from moe_conformance.report.progress import Progress, Silent
from moe_conformance.runner.collector import Collector
from moe_conformance.runner.given_up import Strikes
from moe_conformance.runner.process import quiet_stderr, stops_on_sigterm, suite_environment
from moe_conformance.runner.sharding import Shard
from moe_conformance.time_limits import CASE_TIMEOUT_S

FEW_CASES = 40
"""Below this one worker is quicker: every worker imports torch first, which takes as long as about 40 small cases."""
MANY_CASES = 2000
"""From here more workers than cores pay off: with 1,000 cases the import that each begins with costs as much as they
gain."""
MOST_CRASHES = 100_000
"""xdist's own limit, out of the way: a backend that goes on crashing is given up, see given_up.py."""
GPU_WORKERS = 4
"""Most workers by default on a GPU: each has its own CUDA context of about half a gigabyte."""


def run(
    request: PlanRequest,
    *,
    workers: int | None = None,
    shard: Shard | None = None,
    progress: Progress | None = None,
    timeout_s: float = CASE_TIMEOUT_S,
    backends: Sequence[BackendRecord] = (),
    command: str = "",
    verbose: bool = False,
) -> Report:
    """Runs every case of the request's plan in worker processes; never raises for what a backend does.

    Args:
        request: what to run.
        workers: worker processes; None to choose from the number of cases and cores.
        shard: only this part of the cases.
        progress: is told of every result.
        timeout_s: how long one case may take.
        backends: what the report says of the backends.
        command: what the report gives as the command that repeats the run.
        verbose: shows what workers wrote to stderr.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    planned = [case for case in plan(request) if shard is None or shard.holds(case.id)]
    collector, stopped_by = _execute(planned, request, shard, workers, progress or Silent(), timeout_s, verbose)
    cases = explain_failures(collector.finish(_why_not_run(collector, stopped_by)))
    return Report(
        complete=not stopped_by,
        started=started.isoformat(timespec="seconds"),
        duration_s=round(time.monotonic() - clock, 2),
        selection=_selection(request, shard, timeout_s),
        environment=environment(request.device),
        backends=tuple(backends),
        manifest=tuple(case.id for case in planned),
        cases=cases,
        suite_errors=tuple(collector.suite_errors),
        command=command,
    )


def _execute(
    planned: Sequence[PlannedCase],
    request: PlanRequest,
    shard: Shard | None,
    workers: int | None,
    progress: Progress,
    timeout_s: float,
    verbose: bool,
) -> tuple[Collector, str]:
    """Runs the cases in workers: what they sent, and what stopped them before the end, or nothing."""
    with TemporaryDirectory(prefix="moe-conformance-") as folder:
        given_up = Path(folder) / "given-up"
        collector = Collector(planned, progress, timeout_s, Strikes(given_up))
        if not planned:
            return collector, ""
        count = min(workers or default_workers(len(planned), request), len(planned))
        arguments = [*pytest_arguments(request, shard, count, timeout_s), "--moe-given-up", str(given_up)]
        progress.start(len(planned))
        try:
            return collector, _run_pytest(collector, arguments, verbose)
        finally:
            progress.stop()


def default_workers(cases: int, request: PlanRequest) -> int:
    """How many worker processes pay off."""
    if cases < FEW_CASES:
        return 1
    cores = usable_cores()
    if request.device == "cuda":
        return min(cores, cases, GPU_WORKERS)
    # Half as many again keep the cores busy while ranks wait for a peer that comes late or never; but not for a short
    # run, nor for the layers of a real model, of which each worker holds one.
    waiting = 0 if cases < MANY_CASES or get_profile(request.profile).model else cores // 2
    return min(cores + waiting, cases)


def pytest_arguments(request: PlanRequest, shard: Shard | None, workers: int, timeout_s: float) -> list[str]:
    """The arguments of the controller, which xdist hands to the workers as well."""
    suite = str(files("moe_conformance") / "suite")
    # The suite is its own root: the configuration and the conftest of the user's current folder have no part in it.
    root = [suite, "-c", f"{suite}/pytest.ini", "--rootdir", suite, "--confcutdir", suite]
    # -s: a worker's output goes to its stderr; crash dumps need a real file there, which pytest's capture is not.
    # Plain asserts: the suite's say what its own code relies on, and rewriting them takes each worker a second.
    plugins = ["-s", "--assert", "plain"]
    # Each plugin that no case uses costs its part of the five thousand times that a test is set up, run and torn down.
    for name in ("terminal", "cacheprovider", "logging", "hypothesispytest"):
        plugins += ["-p", f"no:{name}"]
    for name in ("xdist.plugin", "moe_conformance.plugin", "moe_conformance.runner.worker"):
        plugins += ["-p", name]
    # worksteal hands each worker one stretch of the cases, which keeps those of the same inputs together.
    spread = ["-n", str(workers), "--dist", "worksteal", "--max-worker-restart", str(MOST_CRASHES)]
    options = ["--moe-profile", request.profile, "--moe-device", request.device, "--moe-seed", str(request.seed)]
    options += ["--moe-timeout", str(timeout_s)]
    repeated = {
        "--moe-producer": request.producers,
        "--moe-consumer": request.consumers,
        "--moe-partner": request.partners,
        "--moe-clause": request.clauses,
    }
    options += [part for option, values in repeated.items() for value in values for part in (option, value)]
    if request.ranks:
        options += ["--moe-tp", ",".join(map(str, request.ranks))]
    if shard is not None:
        options += ["--moe-shard", str(shard)]
    return [*root, *plugins, *spread, *options]


def _run_pytest(collector: Collector, arguments: list[str], verbose: bool) -> str:
    """Runs the workers; what stopped them before the end, or nothing."""
    status: int | pytest.ExitCode = pytest.ExitCode.OK
    try:
        with suite_environment(), stops_on_sigterm(), quiet_stderr(verbose):
            status = pytest.main(arguments, plugins=[collector])
    except KeyboardInterrupt:
        collector.interrupted = True
    if status == pytest.ExitCode.USAGE_ERROR:
        collector.suite_errors.append("pytest refused its arguments: is another version of pytest or xdist installed?")
    return "an interrupt" if collector.interrupted else ""


def _why_not_run(collector: Collector, stopped_by: str) -> str:
    if stopped_by:
        return f"the run was stopped by {stopped_by} before this case ended"
    if collector.suite_errors:
        return f"the suite failed before this case ran: {collector.suite_errors[0]}"
    return "its worker ended without a result for this case"


def _selection(request: PlanRequest, shard: Shard | None, timeout_s: float) -> Selection:
    profile = get_profile(request.profile)
    return Selection(
        profile=request.profile,
        producers=request.producers,
        consumers=request.consumers,
        ranks=request.ranks or profile.default_ranks,
        ranks_given=request.ranks is not None,
        clauses=request.clauses,
        device=request.device,
        seed=request.seed,
        timeout_s=None if timeout_s == CASE_TIMEOUT_S else timeout_s,
        shard=None if shard is None else str(shard),
        reductions=profile.reductions,
    )
