"""How many cases every test has in each fixed profile; a test that loses its cases is noticed.

``python -m moe_conformance.manifest`` writes ``manifest.toml`` anew; a test compares the two.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path

from moe_conformance.cases.profiles import PROFILE_NAMES, get_profile
from moe_conformance.cases.selection import select_cases
from moe_conformance.plan import suite_tests

Manifest = dict[str, dict[str, int]]
"""Cases by profile and ``module.py::function``, whatever the backends."""
FILE = "manifest.toml"
HEADER = "# Cases of every test in each profile. Written by: python -m moe_conformance.manifest\n"


def committed() -> Manifest:
    """The manifest that is part of the package."""
    found: Manifest = tomllib.loads(files("moe_conformance").joinpath(FILE).read_text(encoding="utf-8"))
    return found


def collected() -> Manifest:
    """The manifest of the suite as it is."""
    tests = sorted(suite_tests().items())
    return {
        profile: {name: len(select_cases(get_profile(profile), test.metadata, None, 0)) for name, test in tests}
        for profile in PROFILE_NAMES
    }


def render(manifest: Manifest) -> str:
    """The manifest as TOML."""
    tables = [
        "\n".join([f"[{profile}]", *(f'"{name}" = {count}' for name, count in tests.items())])
        for profile, tests in manifest.items()
    ]
    return HEADER + "\n\n".join(tables) + "\n"


if __name__ == "__main__":
    Path(str(files("moe_conformance").joinpath(FILE))).write_text(render(collected()), encoding="utf-8")
