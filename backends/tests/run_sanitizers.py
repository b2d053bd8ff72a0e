"""Runs compute-sanitizer over test_cuda_sanitized.py: memcheck, racecheck and synccheck, each clean or a failure.

``python backends/tests/run_sanitizers.py [TOOL...]`` on a machine with a GPU; ``--dry-run`` prints the commands.
A tool counts as clean only when the tests passed under it, none skipped, it printed its own summary of 0 errors, and no
line of it says that something was not tracked. Exit status: 0 clean, 1 not clean, 2 it could not be run.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TESTS = Path(__file__).with_name("test_cuda_sanitized.py")
SELECTED = {
    "memcheck": "test_",
    "synccheck": "test_",
    # Blocks alone, and no two kernels that wait for each other. NVIDIA's manual has racecheck follow cp.async and
    # the entry and exit of clusters; of a launch with clusters it said, on an H200, that it could not track it.
    "racecheck": "alone and block or short_graph",
}
"""pytest's ``-k`` for each tool."""
OPTIONS = {
    "memcheck": ("--report-api-errors", "no"),  # torch asks for much that may fail; a failed launch of ours raises
    "synccheck": (),
    "racecheck": (),
}
COMMON = (
    *("--error-exitcode", "1", "--target-processes", "application-only"),
    *("--launch-timeout", "0"),  # how long to wait for the program, which imports torch first; the limit below ends it
    *("--kernel-name", "kernel_substring=_tail"),  # block_tail and cluster_tail: torch's kernels would take the longest
)
SUMMARY = {
    "memcheck": r"ERROR SUMMARY: 0 errors",
    "synccheck": r"ERROR SUMMARY: 0 errors",
    "racecheck": r"RACECHECK SUMMARY: 0 hazards displayed \(0 errors, 0 warnings\)",
}
DOUBT = re.compile(r"^={9} (?!.*SUMMARY).*\b(warning|error|fail\w*|could not|unable|not supported)\b.*$", re.I | re.M)
"""What a tool says of itself besides its summary; a launch that it does not track is none that it found clean."""
LIMIT_S = 60.0


def pytest_command(selected: str) -> list[str]:
    """The run that a tool looks into."""
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", selected, str(TESTS)]


def command(sanitizer: str, tool: str, selected: str | None = None) -> list[str]:
    """One tool over its tests."""
    return [sanitizer, "--tool", tool, *COMMON, *OPTIONS[tool], *pytest_command(selected or SELECTED[tool])]


def environment() -> dict[str, str]:
    """Modules are loaded as they are used: a tool patches each that is loaded, and torch has thousands of kernels.
    The consumer loads its own before a rank can wait."""
    return os.environ | {"CUDA_MODULE_LOADING": "LAZY", "OMP_NUM_THREADS": "1"}


def complaint(tool: str, status: int | None, output: str) -> str | None:
    """Why a finished run is not clean, in one line; None for a clean one. ``status`` None: it did not end in time."""
    if status is None:
        return "did not end in time"
    if status:
        return f"exit status {status}"
    if not re.search(r"\b[1-9]\d* passed\b", output) or re.search(r"\b(skipped|failed|errors? in)\b", output):
        return "the tests did not all run"
    if not re.search(SUMMARY[tool], output):
        return f"printed no line like {SUMMARY[tool]!r}"
    doubt = DOUBT.search(output)
    return None if doubt is None else f"says: {doubt.group().strip('= ')}"


def run(arguments: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Exit status, None past the limit, and everything printed. Past the limit the program that the tool started is
    ended too: it would keep the GPU."""
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
    )
    status: int | None
    try:
        output, _ = process.communicate(timeout=limit_s)
        status = process.returncode
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        status = None
    return status, output.decode(errors="replace")


def find_sanitizer() -> str | None:
    """compute-sanitizer on PATH, under CUDA_HOME, or where the toolkit installs itself."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    folders = [os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)]
    return shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"default: {' '.join(SELECTED)}")
    parser.add_argument("--select", metavar="EXPRESSION", help="pytest -k in place of each tool's own")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="S", help="seconds for one tool (60)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.tools) - SELECTED.keys():
        parser.error(f"unknown tool {', '.join(sorted(unknown))}; known: {', '.join(SELECTED)}")
    chosen.tools = chosen.tools or list(SELECTED)
    return chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the tests alone, which compiles what is missing, then under each tool."""
    chosen = parse(arguments)
    sanitizer = find_sanitizer()
    if chosen.dry_run:
        for tool in chosen.tools:
            print(shlex.join(command(sanitizer or "compute-sanitizer", tool, chosen.select)))
        return 0
    if sanitizer is None:
        print("compute-sanitizer not found: it is part of the CUDA toolkit; set CUDA_HOME or PATH", file=sys.stderr)
        return 2
    status, output = run(pytest_command(chosen.select or "test_"), 600.0)
    if status or not re.search(r"\b[1-9]\d* passed\b", output):
        print(f"{output}\nthe tests do not pass by themselves, so no tool was run", file=sys.stderr)
        return 2
    return max(_judged(sanitizer, tool, chosen) for tool in chosen.tools)


def _judged(sanitizer: str, tool: str, chosen: argparse.Namespace) -> int:
    """0 for a clean tool, 1 otherwise, after its output."""
    status, output = run(command(sanitizer, tool, chosen.select), chosen.limit)
    reason = complaint(tool, status, output)
    print(output if reason else output[-400:].strip())
    print(f"{tool}: {'clean' if reason is None else f'NOT CLEAN: {reason}'}", flush=True)
    return int(reason is not None)


if __name__ == "__main__":
    sys.exit(main())
