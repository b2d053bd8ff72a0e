"""The project's commands: `python -m pip install nox && nox -s conformance`; arguments after `--` are passed on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2025.2.9"
nox.options.reuse_venv = "yes"  # a second run is seconds; the install step still runs and is a no-op
nox.options.default_venv_backend = "virtualenv"  # uv ignores pip's settings, so it has to be asked for (-db uv)

ROOT = Path(__file__).parent.resolve()
DIST = ROOT / "dist"
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))
PACKAGES = {"contract": "moe_contract", "backends": "moe_backends", "conformance": "moe_conformance"}
"""Import packages by the folder that holds each."""
FLASHINFER_VERSIONS = (
    *("0.6.6", "0.6.7", "0.6.8", "0.6.9", "0.6.10", "0.6.11", "0.6.12", "0.6.13", "0.6.14", "0.6.15", "0.6.16"),
    *("0.6.17", "0.6.18", "0.6.18.post1", "0.7.0", "0.7.1", "0.7.2", "0.7.4"),
)
"""The wheels that `abi` reads: 450 MB in all, kept in the session's folder. There is no 0.7.3."""
ANY_TORCH = "MOE_CONFORMANCE_ANY_TORCH"
"""Environment variable: take the torch that pip resolves, even a CUDA build on a machine without a GPU."""


@nox.session
def conformance(session: nox.Session) -> None:
    """Run the suite on every backend this machine can run: the core profile, or the arguments after `--`."""
    run_command(session, "run", *(session.posargs or ["--profile", "core"]))


@nox.session(default=False)
def doctor(session: nox.Session) -> None:
    """Say what can run on this machine, and why the rest cannot."""
    run_command(session, "doctor", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the project's own tests against the checkout, on all cores."""
    install(session, "-e", ".[test]")
    run_tests(session)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and format with ruff; `-- --fix` mends what it can."""
    session.install(*CONSTRAINTS, "ruff")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", *(() if "--fix" in session.posargs else ("--check",)), ".")


@nox.session
def typing(session: nox.Session) -> None:
    """Check types: mypy in strict mode over the three packages and the noxfile."""
    install(session, "-e", ".[dev]")
    session.run("mypy", *session.posargs)  # not the tests: what they hand over to be refused is wrongly typed by design
    session.run("mypy", *session.posargs, "noxfile.py")


@nox.session(default=False)
def abi(session: nox.Session) -> None:
    """Compare FlashInfer's entry points, in downloaded wheels, with the record; `-- --write` records them.

    Wheels come without dependencies and nothing is imported from them. Further versions: `-- --versions 0.7.5,0.8.0`.
    """
    arguments = list(session.posargs)
    versions: tuple[str, ...] = FLASHINFER_VERSIONS
    if "--versions" in arguments:
        at = arguments.index("--versions")
        versions = (*versions, *arguments[at + 1].split(","))
        del arguments[at : at + 2]
    install(session, "-e", ".")
    wheels = Path(session.create_tmp()) / "wheels"
    for version in versions:
        if not list(wheels.glob(f"flashinfer_python-{version}-*.whl")):
            requirement = f"flashinfer-python=={version}"
            session.run("python", "-m", "pip", "download", "--no-deps", "--quiet", "-d", str(wheels), requirement)
    if "--write" in arguments:
        arguments += ["--table", str(ROOT / "docs" / "flashinfer-abi.md")]
    paths = sorted(map(str, wheels.glob("flashinfer_python-*.whl")))
    session.run("python", "-m", "moe_backends.trtllm.signature_record", *arguments, *paths)


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build sdist and wheel, compare the wheel with the sources, and run what it installs outside the checkout."""
    wheel = build_wheel(session)
    install_wheel(session, wheel)
    session.chdir(session.create_tmp())
    session.run("python", "-c", "import moe_contract as m; assert 'site-packages' in m.__file__, m.__file__")
    session.run("moe-conformance", "doctor")
    session.run("moe-conformance", "run", *(session.posargs or ["--profile", "smoke"]))


@nox.session(default=False)
def tests_wheel(session: nox.Session) -> None:
    """Run the project's own tests against the built wheel instead of the checkout."""
    install_wheel(session, build_wheel(session), extra="[test]")
    run_tests(session)


@nox.session(default=False)
def faults(session: nox.Session) -> None:
    """Run the suite on planted faults and correct variants, or with `-- --clause ID` on some."""
    run_command(session, "faults", *session.posargs)


@nox.session(default=False)
def faults_page(session: nox.Session) -> None:
    """Run all planted faults and write docs/faults.md from what was found."""
    install(session, "-e", ".")
    file = str(Path(session.create_tmp()) / "faults.json")
    session.run("moe-conformance", "faults", "--json", file, *session.posargs, success_codes=[0, 1])
    session.run("python", "-m", "moe_conformance.faults.document", file, str(ROOT / "docs" / "faults.md"))


@nox.session(default=False)
def false_alarms(session: nox.Session) -> None:
    """Judge 20,000 random legal cases of correct backends, for a nightly run; one false alarm fails."""
    install(session, "-e", ".[test]")
    environment = {"MOE_CONFORMANCE_RANDOM_CASES": "20000", "OMP_NUM_THREADS": "1"}
    tests = str(ROOT / "conformance" / "tests" / "test_no_false_alarms.py")
    session.run("pytest", "-n", "auto", tests, *session.posargs, env=environment)


@nox.session(default=False)
def mutation(session: nox.Session) -> None:
    """Weaken or negate the suite's own checks one by one, report who notices; takes hours: `-- --every 20`."""
    install(session, "-e", ".[test]")
    tests = ("contract/tests", "conformance/tests/test_judging.py", "conformance/tests/test_bounds.py")
    paths = [str(ROOT / each) for each in tests]
    session.run("python", "-m", "moe_conformance.faults.mutation", *session.posargs, "--tests", *paths)


def run_command(session: nox.Session, *arguments: str) -> None:
    """Runs the project's command from the checkout: installed in the session, or as it lies with `nox --no-venv`."""
    if session.venv_backend == "none":
        python, environment = prepare_runner(session)
        session.run(python, "-m", "moe_conformance", *arguments, env=environment, external=True)
    else:
        install(session, "-e", ".")
        session.run("moe-conformance", *arguments)


def run_tests(session: nox.Session) -> None:
    """Runs pytest on all cores; one thread each, since every worker would otherwise start a thread per core."""
    session.run("pytest", "-n", "auto", *session.posargs, env={"OMP_NUM_THREADS": "1"})


def install(session: nox.Session, *what: str) -> None:
    """Installs under the constraints, and without a CUDA build of torch on a machine that has no GPU."""
    session.env["PYTHONPATH"] = ""  # what is installed is what is tested
    if session.venv_backend == "uv":
        session.env.update(uv_settings(os.environ, wants_cpu_torch()))
        session.install(*CONSTRAINTS, *what)
        return
    if wants_cpu_torch():
        provide_cpu_torch(session)
    # Compiling all of torch takes longer than installing it (29 of 51 s on two cores); an import compiles what it uses.
    session.install("--no-compile", *CONSTRAINTS, *what)


def install_wheel(session: nox.Session, wheel: Path, extra: str = "") -> None:
    """Installs the wheel and what it needs; its files anew even where the same version is already there."""
    install(session, f"{wheel}{extra}")
    session.install("--force-reinstall", "--no-deps", str(wheel))


def wants_cpu_torch() -> bool:
    """Whether a CUDA build of torch would be a useless download: Linux (others get CPU builds), no NVIDIA driver."""
    gpu = Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi") is not None
    return sys.platform == "linux" and not gpu and not os.environ.get(ANY_TORCH)


def uv_settings(environment: Mapping[str, str], cpu: bool) -> dict[str, str]:
    """What uv, which does not read pip's settings, has to be told so that it finds the same torch."""
    if "UV_FIND_LINKS" in environment or "UV_TORCH_BACKEND" in environment:
        return {}
    if links := environment.get("PIP_FIND_LINKS"):
        return {"UV_FIND_LINKS": links}
    return {"UV_TORCH_BACKEND": "cpu"} if cpu else {}


def provide_cpu_torch(session: nox.Session) -> None:
    """Installs torch's CPU build first where pip by itself would take a CUDA build.

    pip is asked, not told: its own settings (an index, a folder of wheels) win when they lead to a CPU build. Where
    they do not, uv is used for torch alone, since it knows where the CPU builds are.
    """
    dry_run = ("--dry-run", "--quiet", "--no-deps", "--report", "-")
    # Part of the installation: run with `nox --install-only`, and not where `nox -R` installs nothing.
    report = session.run_install(
        "python", "-m", "pip", "install", *dry_run, *CONSTRAINTS, "torch", silent=True, stderr=subprocess.DEVNULL
    )
    if report is None or not brings_cuda(json.loads(str(report))):
        return
    session.log("pip would take a CUDA build of torch, and this machine has no GPU: taking the CPU build through uv")
    session.install("uv")
    python = str(Path(session.bin) / "python")
    try:
        session.run_install(
            "uv", "pip", "install", "--python", python, "--no-deps", "--torch-backend", "cpu", *CONSTRAINTS, "torch"
        )
    except CommandFailed:
        session.error(
            "no CPU build of torch was found, and a CUDA build (several GB) is not downloaded without a GPU; "
            "set PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL to where a CPU build is, "
            f"or {ANY_TORCH}=1 to take the CUDA build"
        )


def brings_cuda(report: Mapping[str, Any]) -> bool:
    """Whether pip's installation report holds a package that requires NVIDIA's libraries."""
    requirements = [r for item in report["install"] for r in item["metadata"].get("requires_dist", ())]
    return any(requirement.startswith(("nvidia-", "cuda-")) for requirement in requirements)


def build_wheel(session: nox.Session) -> Path:
    """Builds the sdist, from it the wheel, and fails when the wheel's files are not those of the sources."""
    session.install("build")
    for old in DIST.glob("moe_conformance-*"):
        old.unlink()
    command = ("python", "-m", "build", "--outdir", str(DIST), str(ROOT))
    session.run(*command)
    if not list(DIST.glob("moe_conformance-*.whl")):  # `nox --install-only` runs nothing but installations
        session.run_install(*command)
    (wheel,) = DIST.glob("moe_conformance-*.whl")
    if differences := wheel_differences(wheel):
        session.error(f"{wheel.name} does not hold what the sources hold: " + "; ".join(differences))
    return wheel


def wheel_differences(wheel: Path) -> list[str]:
    """One line for each file that is in the packages' folders and not in the wheel, or the other way round."""
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {
        path.relative_to(ROOT / folder)
        for folder, package in PACKAGES.items()
        for path in (ROOT / folder / package).rglob("*")
        if path.is_file()
    }
    caches = re.compile(r"__pycache__|\..+")  # of Python and of tools, such as .pytest_cache
    expected = {path.as_posix() for path in sources if not any(map(caches.fullmatch, path.parts))}
    missing = [f"{name} is missing (is it matched by .gitignore?)" for name in sorted(expected - packed)]
    return missing + [f"{name} is in no package folder" for name in sorted(packed - expected)]


def prepare_runner(session: nox.Session) -> tuple[str, dict[str, str]]:
    """For `nox --no-venv`: an interpreter that has everything, and the environment that runs the checkout in it.

    Nothing is installed, so the runner's own torch stays as it is. The checkout goes on PYTHONPATH, with the metadata
    that an installation would have written, since backends are found by entry point.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = Path(session.create_tmp())
    write_metadata(project, metadata)
    paths = [str(metadata), *(str(ROOT / folder) for folder in PACKAGES), os.environ.get("PYTHONPATH", "")]
    return find_python(session, project["dependencies"]), {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def write_metadata(project: Mapping[str, Any], folder: Path) -> None:
    """Writes the two files of an installed distribution that entry points are read from."""
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    lines = [
        line for group, points in groups.items() for line in (f"[{group}]", *(f"{k} = {v}" for k, v in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_python(session: nox.Session, requirements: Sequence[str]) -> str:
    """The first of PATH's python, its python3 and nox's own interpreter in which every requirement is installed."""
    names = [re.split(r"[^\w-]", requirement, maxsplit=1)[0] for requirement in requirements]
    lacking = {}
    for python in dict.fromkeys(filter(None, (shutil.which("python"), shutil.which("python3"), sys.executable))):
        lacking[python] = missing_from(python, names)
        if not lacking[python]:
            return python
    listing = "; ".join(f"{python} lacks {', '.join(missing)}" for python, missing in lacking.items())
    session.error(f"no interpreter has what the suite needs, and --no-venv installs nothing: {listing}")


def missing_from(python: str, distributions: Sequence[str]) -> list[str]:
    """Which distributions are not installed for this interpreter; its version, when that is too old."""
    probe = (
        "import importlib.metadata as m, sys\n"
        "if sys.version_info < (3, 11): print('Python 3.11')\n"
        "for name in sys.argv[1:]:\n"
        "    try: m.version(name)\n"
        "    except m.PackageNotFoundError: print(name)\n"
    )
    result = subprocess.run([python, "-c", probe, *distributions], capture_output=True, text=True, check=False)
    return result.stdout.splitlines() if result.returncode == 0 else [f"a working interpreter ({result.stderr[-80:]})"]
