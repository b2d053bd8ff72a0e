"""Where a run takes place: versions, device, and the commit of a checkout."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import moe_conformance
from moe_conformance.report.model import Environment
from moe_contract import CONTRACT_VERSION

DISTRIBUTION = "moe-conformance"
GIT_TIMEOUT_S = 10.0


def environment(device: str) -> Environment:
    """The environment of a run on ``device``."""
    import torch

    name, capability, cuda = device, None, None
    if device == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        cuda = torch.version.cuda
    revision, dirty = _checkout()
    return Environment(
        suite_version=suite_version(),
        contract_version=CONTRACT_VERSION,
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(),
        device=name,
        compute_capability=capability,
        cuda=cuda,
        revision=revision,
        dirty=dirty,
    )


def suite_version() -> str:
    """The version of the installed distribution."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown (not installed)"


def _checkout() -> tuple[str | None, bool | None]:
    """Commit and whether there are uncommitted changes, when the package lies in its own git checkout."""
    root = Path(moe_conformance.__file__).resolve().parents[2]
    if not (root / ".git").exists() or not (root / "contract").is_dir():
        return None, None
    revision = _git(root, "rev-parse", "HEAD")
    changes = _git(root, "status", "--porcelain")
    return revision, None if changes is None else bool(changes)


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
