"""What is shipped is complete, and the commands that the documents give exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import Distribution, packages_distributions
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import nox.registry
import pytest

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SLOW = {"build", "tests_wheel"}
"""Sessions that a bare `nox` leaves out."""


@pytest.fixture(scope="module")
def noxfile() -> ModuleType:
    """The noxfile as a module."""
    spec = importlib.util.spec_from_file_location("project_noxfile", ROOT / "noxfile.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from the checkout without a network."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-t", "sdist", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def declared_distributions(requirements: list[str]) -> set[str]:
    """Normalised names of requirements such as ``pytest-xdist>=3.6``."""
    return {re.split(r"[^\w-]", requirement, maxsplit=1)[0].lower().replace("_", "-") for requirement in requirements}


def imports_by_file() -> dict[str, set[str]]:
    """Top-level names that each file of the three packages imports, inside functions too."""
    found: dict[str, set[str]] = {}
    for folder in ("contract/moe_contract", "backends/moe_backends", "conformance/moe_conformance"):
        for file in (ROOT / folder).rglob("*.py"):
            names = found.setdefault(str(file.relative_to(ROOT)), set())
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names.add(node.module.partition(".")[0])
    return found


def test_wheel_holds_every_file_of_the_packages(noxfile: ModuleType, dist: Path) -> None:
    """Modules and data files in the packages' folders are in the wheel, and nothing else is; the licence goes along."""
    (wheel,) = dist.glob("*.whl")
    assert noxfile.wheel_differences(wheel) == []
    with zipfile.ZipFile(wheel) as archive:
        (licence,) = [name for name in archive.namelist() if name.endswith("licenses/LICENSE")]
        assert b"END OF TERMS AND CONDITIONS" in archive.read(licence)


def test_wheel_check_names_what_differs(noxfile: ModuleType, dist: Path, tmp_path: Path) -> None:
    """A wheel that lacks one data file or holds one file too many is refused with that file's name."""
    (wheel,) = dist.glob("*.whl")
    changed = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            if name != "moe_contract/py.typed":
                new.writestr(name, old.read(name))
        new.writestr("tests/helpers.py", "")
    lines = noxfile.wheel_differences(changed)
    assert [line.split()[0] for line in lines] == ["moe_contract/py.typed", "tests/helpers.py"]


def test_sdist_holds_what_the_sessions_need(dist: Path) -> None:
    """Who receives the sdist can run the sessions: tests, the files they read, noxfile, constraints and documents."""
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tests = {str(file.relative_to(ROOT)) for file in ROOT.glob("*/tests/test_*.py")}
    benchmarks = {
        str(file.relative_to(ROOT)) for file in ROOT.glob("benchmarks/**/*.*") if "__pycache__" not in file.parts
    }
    assert tests
    assert "benchmarks/trtllm_models.py" in benchmarks
    expected = {".ci/run", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "constraints.txt", "noxfile.py"}
    assert not (tests | benchmarks | expected) - names


def test_every_session_says_what_it_does(noxfile: ModuleType) -> None:
    """Each nox session has a docstring, and a bare `nox` leaves the slow ones out."""
    sessions = nox.registry.get()
    assert sessions.keys() >= SLOW
    assert not [name for name, session in sessions.items() if not session.__doc__]
    assert not [name for name in SLOW if sessions[name].default]


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", ".ci/run", ".github/workflows/ci.yml", ".github/workflows/gpu.yml"]
)
def test_documented_commands_exist(noxfile: ModuleType, document: str) -> None:
    """Every session that a document tells its reader to run is in the noxfile."""
    text = (ROOT / document).read_text(encoding="utf-8")
    named = {
        name
        for command in re.findall(r"\bnox\"?(?: --no-venv)? -s ((?:[a-z_]+[ \t]?)+)", text)
        for name in command.split()
    }
    assert "conformance" in named
    assert named <= nox.registry.get().keys()


def test_every_import_is_declared() -> None:
    """What the packages import is the standard library, the project itself, a dependency or an extra."""
    declared = declared_distributions([*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())])
    providers = packages_distributions()
    own = sys.stdlib_module_names | {"moe_contract", "moe_backends", "moe_conformance"}
    absent_here = {"flashinfer": "flashinfer-python", "tvm_ffi": "apache-tvm-ffi", "triton": "triton"}
    for file, names in imports_by_file().items():
        for name in names - own:
            distributions = {absent_here[name]} if name in absent_here else set(providers.get(name, [name]))
            assert {d.lower().replace("_", "-") for d in distributions} & declared, f"{file} imports {name}"


def test_every_entry_point_loads() -> None:
    """The command, the pytest plugin and each named backend import without a GPU."""
    groups = [PROJECT["scripts"], *PROJECT["entry-points"].values()]
    for target in (target for group in groups for target in group.values()):
        module, _, attribute = target.partition(":")
        found: object = importlib.import_module(module)
        assert not attribute or getattr(found, attribute) is not None, target


def test_checkout_without_installation_has_the_entry_points(noxfile: ModuleType, tmp_path: Path) -> None:
    """`nox --no-venv` gives the checkout the same name, version and entry points as an installation."""
    noxfile.write_metadata(PROJECT, tmp_path)
    (info,) = tmp_path.iterdir()
    installed = Distribution.at(info)
    assert (installed.metadata["Name"], installed.version) == (PROJECT["name"], PROJECT["version"])
    found = {(point.group, point.name, point.value) for point in installed.entry_points}
    groups = {"console_scripts": PROJECT["scripts"], **PROJECT["entry-points"]}
    assert found == {(group, name, value) for group, points in groups.items() for name, value in points.items()}


def test_missing_distribution_is_named(noxfile: ModuleType) -> None:
    """The check of a GPU runner's interpreter names what it lacks, and only that."""
    assert noxfile.missing_from(sys.executable, ["torch", "no-such-distribution"]) == ["no-such-distribution"]


@pytest.mark.parametrize(
    ("requirements", "cuda"),
    [
        (["filelock", "sympy>=1.13.3"], False),
        (["filelock", 'nvidia-nccl-cu13==2.28; platform_system == "Linux"'], True),
        (["cuda-bindings>=13", "sympy"], True),
    ],
)
def test_cuda_build_is_recognised(noxfile: ModuleType, requirements: list[str], cuda: bool) -> None:
    """A torch that would bring NVIDIA's libraries along is told from one that would not."""
    assert noxfile.brings_cuda({"install": [{"metadata": {"requires_dist": requirements}}]}) is cuda
    assert noxfile.brings_cuda({"install": []}) is False


def test_uv_is_told_where_the_cpu_build_is(noxfile: ModuleType) -> None:
    """uv gets pip's folder of wheels, else its own CPU index where a GPU is missing; its own settings are kept."""
    assert noxfile.uv_settings({"PIP_FIND_LINKS": "wheels"}, cpu=True) == {"UV_FIND_LINKS": "wheels"}
    assert noxfile.uv_settings({}, cpu=True) == {"UV_TORCH_BACKEND": "cpu"}
    assert noxfile.uv_settings({}, cpu=False) == {}
    assert noxfile.uv_settings({"UV_TORCH_BACKEND": "cu130", "PIP_FIND_LINKS": "wheels"}, cpu=True) == {}


class InstallOnly:
    """What nox hands a session with ``--install-only``: installations are run, any other command gives None."""

    def __init__(self, folder: Path, dist: Path) -> None:
        self.folder, self.dist = folder, dist
        self.posargs: list[str] = []
        self.env: dict[str, str] = {}
        self.venv_backend, self.bin = "virtualenv", str(folder)
        self.installed: list[str] = []

    def run(self, *command: str, **options: Any) -> None: ...

    def chdir(self, folder: str) -> None: ...

    def log(self, text: str) -> None: ...

    def create_tmp(self) -> str:
        return str(self.folder)

    def install(self, *what: str, **options: Any) -> None:
        self.installed.append(what[-1])

    def run_install(self, *command: str, **options: Any) -> str:
        if "--report" in command:
            return '{"install": [{"metadata": {"requires_dist": ["cuda-bindings"]}}]}'
        if "--outdir" in command:
            shutil.copytree(self.dist, command[command.index("--outdir") + 1], dirs_exist_ok=True)
        self.installed.append(command[-1])
        return ""


@pytest.mark.parametrize(
    "name", re.findall(r"^@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE)
)
def test_every_session_can_be_installed_only(
    noxfile: ModuleType, dist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """`nox --install-only` prepares each session, torch's CPU build and the wheel included, and runs none."""
    monkeypatch.setattr(noxfile, "DIST", tmp_path / "dist")
    monkeypatch.setattr(noxfile, "wants_cpu_torch", lambda: True)
    session = InstallOnly(tmp_path, dist)
    nox.registry.get()[name](session)
    assert session.installed
    if name != "lint":
        assert session.installed.index("torch") < len(session.installed) - 1
    if name in {"build", "tests_wheel"}:
        assert session.installed[-1].endswith(".whl")


def test_reinstalling_nothing_leaves_torch_alone(noxfile: ModuleType, tmp_path: Path) -> None:
    """With `nox -R` pip's report is not asked for, and torch not installed."""
    session = InstallOnly(tmp_path, tmp_path)
    session.run_install = session.run
    noxfile.provide_cpu_torch(session)
    assert not session.installed


def test_ci_is_executable() -> None:
    """`.ci/run` can be called as it lies."""
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
