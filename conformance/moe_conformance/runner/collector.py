"""The controller's pytest plugin: one result for every planned case, whatever became of the worker that ran it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pytest

from moe_conformance.plan import PlannedCase
from moe_conformance.plugin import PROPERTY, WATCHDOG_FACTOR
from moe_conformance.report.model import CaseResult
from moe_conformance.report.progress import Progress
from moe_conformance.runner.crashes import describe, exit_status
from moe_conformance.runner.given_up import Backends, Strikes
from moe_conformance.verdicts import Verdict

CRASHED = "???"
"""What xdist puts for ``when`` in the report that it makes for the item a lost worker was running."""
MOST_IDLE_CRASHES = 3
"""Workers that may die without running a case; more would die in the same way, at an import for instance."""
KILL_AFTER_S = 2
"""How long an interrupted worker may take to end by itself."""


class Collector:
    """Gathers results from the workers' reports and notices what the suite itself got wrong."""

    def __init__(self, planned: Sequence[PlannedCase], progress: Progress, timeout_s: float, strikes: Strikes) -> None:
        self.planned: Mapping[str, PlannedCase] = {case.id: case for case in planned}
        self.results: dict[str, CaseResult] = {}
        self.suite_errors: list[str] = []
        self.interrupted = False
        self._progress = progress
        self._timeout_s = timeout_s
        self._strikes = strikes
        self._started: dict[str, float] = {}
        self._idle_crashes = 0
        self._given_up = False
        self._config: pytest.Config | None = None

    def pytest_configure(self, config: pytest.Config) -> None:
        """Keeps the configuration, through which a run can be stopped."""
        self._config = config

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Notes when a case began, to tell a hang from a crash."""
        self._started[nodeid] = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the result that the plugin attached, or makes one for a worker that crashed and a phase that failed."""
        attached = next((value for name, value in report.user_properties if name == PROPERTY), None)
        if report.when == CRASHED:
            self._take_crash(report)
        elif attached is not None and report.nodeid not in self.results:
            self._take(CaseResult.model_validate_json(str(attached)))
        elif report.failed and not self._is_broken(report.nodeid):
            self._take(self._failed_phase(report))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Lets a command to a worker that just died get lost: xdist learns of its death next and gives its cases on.

        Without this the OSError ends the whole run, when two workers die at almost the same time.
        """
        send = node.sendcommand

        def send_if_alive(name: str, **arguments: object) -> None:
            with suppress(OSError):
                send(name, **arguments)

        node.sendcommand = send_if_alive

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        """Compares what a worker found with the plan: neither more nor less may run."""
        difference = _difference(self.planned, ids)
        if difference and difference not in self.suite_errors:
            self.suite_errors.append(difference)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        """Counts lost workers and stops the run when they die before they run anything."""
        if not error or self.interrupted:
            return
        self._idle_crashes = 0 if self._started else self._idle_crashes + 1
        if self._idle_crashes >= MOST_IDLE_CRASHES:
            reason = (
                f"{self._idle_crashes} worker processes ended before they ran a case (exit status {exit_status(node)})"
            )
            self.suite_errors.append(reason)
            self._stop(reason)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A test file that cannot be collected is an error of the suite."""
        if report.failed:
            self.suite_errors.append(f"collecting {report.nodeid or 'the suite'} failed: {_last_line(report.longrepr)}")

    def pytest_internalerror(self, excrepr: object) -> None:
        """So is an internal error of pytest or of a plugin."""
        self.suite_errors.append(f"internal error of the test run: {_last_line(excrepr)}")

    def pytest_keyboard_interrupt(self) -> None:
        """Ctrl-C or SIGTERM: workers that do not end soon are killed."""
        self.interrupted = not self._given_up
        manager = getattr(self._distribution(), "nodemanager", None)
        if manager is not None:
            manager.EXIT_TIMEOUT = KILL_AFTER_S

    def finish(self, why_not_run: str) -> tuple[CaseResult, ...]:
        """Every planned case in the plan's order; those without a result get ``not-run`` with the reason."""

        def not_run(case: PlannedCase) -> CaseResult:
            given_up = self._strikes.reason(Backends(case.producer, case.consumer))
            return planned_result(case, Verdict.NOT_RUN, given_up or why_not_run)

        return tuple(self.results.get(case.id) or not_run(case) for case in self.planned.values())

    def _take(self, result: CaseResult) -> None:
        if result.id not in self.planned:
            self.suite_errors.append(f"{result.id} ran but was not planned")
            return
        first = result.id not in self.results
        self.results[result.id] = result
        if first:
            self._progress.advance(result)
        if result.verdict is Verdict.ERROR and result.duration_s >= self._timeout_s:
            self._strikes.add(Backends(result.producer, result.consumer))

    def _take_crash(self, report: pytest.TestReport) -> None:
        if self._is_broken(report.nodeid):
            return
        began = self._started.get(report.nodeid)
        elapsed = None if began is None else time.monotonic() - began
        limit_s = WATCHDOG_FACTOR * self._timeout_s
        case = self.planned.get(report.nodeid)
        backends = Backends(case.producer, case.consumer) if case else Backends(None, None)
        reason = f"{backends} {describe(exit_status(getattr(report, 'node', None)), elapsed, limit_s)}"
        self._take(self._error(report.nodeid, reason, suite=False, duration_s=elapsed or 0.0))
        if elapsed is None or elapsed < self._timeout_s:  # _take counts what lasted longer
            self._strikes.add(backends)

    def _failed_phase(self, report: pytest.TestReport) -> CaseResult:
        reason = f"the suite failed in {report.when}: {_last_line(report.longrepr)}"
        return self._error(report.nodeid, reason, suite=True, duration_s=report.duration)

    def _error(self, nodeid: str, reason: str, *, suite: bool, duration_s: float) -> CaseResult:
        case = self.planned.get(nodeid)
        if case is None:
            return CaseResult(id=nodeid, test=nodeid, clause="", verdict=Verdict.ERROR, reason=reason, suite_error=True)
        result = planned_result(case, Verdict.ERROR, reason)
        return result.model_copy(update={"suite_error": suite, "duration_s": round(duration_s, 4)})

    def _is_broken(self, nodeid: str) -> bool:
        return nodeid in self.results and self.results[nodeid].broken

    def _distribution(self) -> Any:
        return self._config.pluginmanager.getplugin("dsession") if self._config else None

    def _stop(self, reason: str) -> None:
        self._given_up = True
        distribution = self._distribution()
        if distribution is not None:
            distribution.shouldstop = reason


def planned_result(case: PlannedCase, verdict: Verdict, reason: str) -> CaseResult:
    """The result of a case of which only the plan is known."""
    return CaseResult(
        id=case.id,
        test=case.test,
        clause=case.clause,
        producer=case.producer,
        consumer=case.consumer,
        case=case.case,
        case_id=case.case_id,
        verdict=verdict,
        reason=reason,
    )


def _difference(planned: Iterable[str], collected: Iterable[str]) -> str:
    wanted, found = set(planned), set(collected)
    for missing in sorted(wanted - found):
        return f"the suite did not collect {len(wanted - found)} of {len(wanted)} planned cases, the first is {missing}"
    for extra in sorted(found - wanted):
        return f"the suite collected {len(found - wanted)} cases that were not planned, the first is {extra}"
    return ""


def _last_line(longrepr: object) -> str:
    """The line of a traceback that says what went wrong."""
    crash = getattr(longrepr, "reprcrash", None)
    text = str(getattr(crash, "message", None) or longrepr)
    lines = [line.removeprefix("E").strip() for line in text.splitlines() if line.strip()]
    errors = [
        line for line, raw in zip(lines, filter(str.strip, text.splitlines()), strict=True) if raw.startswith("E ")
    ]
    return (errors or lines or ["no message"])[0 if crash or errors else -1][:300]
