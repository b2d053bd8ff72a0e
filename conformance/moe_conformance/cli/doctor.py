"""``moe-conformance doctor``: what can run on this machine, and why the rest cannot."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import textwrap
from importlib.metadata import PackageNotFoundError, version

from moe_conformance.cli.selection import choose_device, installed_candidates
from moe_conformance.exit_status import ExitStatus
from moe_conformance.report.environment import suite_version
from moe_conformance.report.terminal import make_console
from moe_contract import CONTRACT_VERSION, Installation, Installed
from moe_contract.discovery import BackendNotFoundError, installed_backends, load_backend

LABEL_WIDTH = 12
PROBE_TIMEOUT_S = 20.0


def doctor_command() -> None:
    """Prints one line for each thing a backend may need, then one for each backend."""
    width = make_console().width
    for label, value in facts().items():
        _print(label, value, width)
    device = choose_device(None)
    print(f"\nbackends on {device}:")
    candidates = installed_candidates(device)
    names = max((len(f"{candidate.side} {candidate.name}") for candidate in candidates), default=0)
    for candidate in candidates:
        state = f"cannot run: {candidate.not_run_reason}" if candidate.not_run_reason else "can run"
        head = f"  {f'{candidate.side} {candidate.name}':<{names}}  "
        lines = textwrap.wrap(state, width, initial_indent=head, subsequent_indent=" " * 6, break_long_words=False)
        print("\n".join(lines))
    if not candidates:
        print("  none is installed; name one as module:object")


def package_command(package: str) -> int:
    """Prints which calls of the backends the installed ``package`` would not take, without making any.

    0 where all bind, 1 where one does not, 3 where the package or a backend that calls it is not installed.
    """
    found: dict[tuple[str, str], Installation] = {}
    for name in installed_backends():
        try:
            backend = load_backend(name)
        except BackendNotFoundError:
            continue
        for side, each in (("producer", backend.producer), ("consumer", backend.consumer)):
            if isinstance(each, Installed) and (report := each.installation()).package == package:
                found[side, name] = report
    width = make_console().width
    for (side, name), report in found.items():
        state = "; ".join(report.problems) or "every call binds"
        what = f"{package} {report.version}: {state}" if report.version else f"{package} is not installed"
        head = f"{side} {name}  "
        print("\n".join(textwrap.wrap(what, width, initial_indent=head, subsequent_indent=" " * 6)))
    if any(report.problems for report in found.values()):
        return ExitStatus.BROKEN
    return ExitStatus.HOLDS if any(report.version for report in found.values()) else ExitStatus.NOTHING_RAN


def facts() -> dict[str, str]:
    """What this machine has, by name."""
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    return {
        "suite": f"moe-conformance {suite_version()}, contract {CONTRACT_VERSION}",
        "python": f"{platform.python_version()} ({sys.executable})",
        "torch": f"{torch.__version__} ({build})",
        "processors": f"{os.cpu_count()}",
        "GPU": _gpus(),
        "nvcc": _nvcc(),
        "flashinfer": _package("flashinfer", "flashinfer-python"),
        "tvm_ffi": _package("tvm_ffi", "apache-tvm-ffi"),
    }


def _gpus() -> str:
    import torch

    if torch.cuda.is_available():
        names = []
        for index in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(index)
            names.append(f"{torch.cuda.get_device_name(index)} (compute capability {major}.{minor})")
        return "; ".join(names)
    if torch.version.cuda is None:
        driver = shutil.which("nvidia-smi") is not None
        return "the driver is here, but this torch is built for the CPU only" if driver else "none"
    return "none that torch can use: is the driver installed, and new enough for this torch?"


def _nvcc() -> str:
    found = shutil.which("nvcc")
    if found is None:
        return "not found on PATH; kernels that are compiled when first used cannot be built"
    try:
        done = subprocess.run(
            [found, "--version"], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{found} does not run: {error}"
    release = [line for line in done.stdout.splitlines() if "release" in line]
    return f"{release[0].strip() if release else 'unknown version'} ({found})"


def _package(module: str, distribution: str) -> str:
    if importlib.util.find_spec(module) is None:
        return f"not installed (pip install {distribution})"
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "present, version unknown"


def _print(label: str, value: str, width: int) -> None:
    head = f"{label:<{LABEL_WIDTH}}"
    print("\n".join(textwrap.wrap(value, width, initial_indent=head, subsequent_indent=" " * LABEL_WIDTH)))
