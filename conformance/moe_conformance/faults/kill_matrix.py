"""The kill matrix: every fault and every correct variant, over worker processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from moe_conformance.faults.catalogue import faults, variants
from moe_conformance.faults.execution import run_fault, run_variant
from moe_conformance.faults.results import FaultResult, MatrixReport, VariantResult
from moe_conformance.faults.rules import apply_rules
from moe_conformance.machine import usable_cores
from moe_conformance.plan import suite_tests

Progress = Callable[[FaultResult | VariantResult], None]


def run_matrix(
    fault_ids: Sequence[str],
    variant_ids: Sequence[str],
    *,
    quick: bool = False,
    workers: int | None = None,
    progress: Progress = lambda result: None,
) -> MatrixReport:
    """Runs the suite on each; the report is in the catalogue's order whatever the order in which they end."""
    started = time.monotonic()
    tasks = [("fault", name, quick) for name in fault_ids] + [("variant", name, quick) for name in variant_ids]
    found: dict[tuple[str, str], FaultResult | VariantResult] = {}
    count = min(workers or usable_cores(), max(1, len(tasks)))
    if count == 1:
        for task in tasks:
            found[task[0], task[1]] = result = _one(*task)
            progress(result)
    else:
        # Spawned, not forked: a fork of a process that has run torch's threads may hang.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(count, mp_context=context, initializer=_one_thread) as pool:
            futures = {pool.submit(_one, *task): task for task in tasks}
            for future in as_completed(futures):
                task = futures[future]
                found[task[0], task[1]] = result = future.result()
                progress(result)
    results = [found["fault", name] for name in fault_ids]
    right = [found["variant", name] for name in variant_ids]
    report = MatrixReport(
        profile="smoke, then core",
        faults=tuple(result for result in results if isinstance(result, FaultResult)),
        variants=tuple(result for result in right if isinstance(result, VariantResult)),
        seconds=round(time.monotonic() - started, 1),
    )
    whole = not quick and set(fault_ids) == set(faults())
    return report.model_copy(update={"idle_tests": idle_tests(report)}) if whole else report


def idle_tests(report: MatrixReport) -> tuple[str, ...]:
    """The tests of the suite that no fault of the report made fail."""
    busy = {test for fault in report.faults for test in fault.tests}
    return tuple(name for name in suite_tests() if name not in busy)


def _one(kind: str, name: str, quick: bool) -> FaultResult | VariantResult:
    if kind == "variant":
        return run_variant(variants()[name]).model_copy(update={"rules": apply_rules(variants()[name])})
    result = run_fault(faults()[name], quick=quick)
    if quick or result.verdict == "not-runnable":
        return result
    return result.model_copy(update={"rules": apply_rules(faults()[name])})


def _one_thread() -> None:
    torch.set_num_threads(1)
