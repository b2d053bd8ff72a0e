"""Mutation of the suite's own checks: each predicate and bound weakened or negated in turn; does anything notice?

``python -m moe_conformance.faults.mutation [--every N] [--only FILE] [--json FILE]``. A mutant that no fault, no
correct variant and no self-test notices is a check that may as well not be there.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import moe_conformance
import moe_contract
from moe_conformance.machine import usable_cores

TARGETS = (
    ("moe_conformance", "judging/judge.py"),
    ("moe_conformance", "truth/bounds.py"),
    ("moe_conformance", "judging/negative_controls.py"),
    ("moe_conformance", "judging/layer_judge.py"),
    ("moe_conformance", "truth/quant_oracle.py"),
    ("moe_conformance", "suite/comparisons.py"),
    ("moe_conformance", "suite/deferral.py"),
    ("moe_conformance", "suite/refusals.py"),
    ("moe_conformance", "suite/test_reduce.py"),
    ("moe_conformance", "suite/test_defer.py"),
    ("moe_conformance", "suite/test_capability.py"),
    ("moe_contract", "checks/metadata.py"),
    ("moe_contract", "checks/routes.py"),
    ("moe_contract", "checks/values.py"),
    ("moe_contract", "checks/weights.py"),
    ("moe_contract", "checks/group.py"),
)
"""What decides about a verdict: package and file."""
ROOTS = {module.__name__: Path(str(module.__file__)).parent for module in (moe_conformance, moe_contract)}
WEAKENED = 64.0
"""Factor of a bound that is weakened: more than a bound's own slack between a typical and a worst case."""
LONGEST_S = 600.0


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    package: str
    file: str
    line: int
    change: str
    source: str

    @property
    def place(self) -> str:
        """Where, as a reader finds it."""
        return f"{self.package}/{self.file}:{self.line}"


def mutants(package: str, file: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    tree = ast.parse((ROOTS[package] / file).read_text(encoding="utf-8"))
    for number, node in enumerate(ast.walk(tree)):
        for change in _changes(node):
            mutated = copy.deepcopy(tree)
            target = next(other for at, other in enumerate(ast.walk(mutated)) if at == number)
            _apply(target, change)
            source = ast.unparse(ast.fix_missing_locations(mutated))
            yield Mutant(package, file, getattr(node, "lineno", 0), change, source)


def _changes(node: ast.AST) -> tuple[str, ...]:
    if isinstance(node, ast.If | ast.IfExp):
        return ("condition negated", "condition never")
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _WEAKER:
        return ("comparison at its edge",)
    if isinstance(node, ast.Return) and isinstance(node.value, ast.Compare | ast.BoolOp):
        return ("predicate always true", "predicate always false")
    if isinstance(node, ast.Return) and isinstance(node.value, ast.BinOp):
        return ("bound weakened", "bound zero")
    return ()


_WEAKER = {ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}


def _apply(node: ast.AST, change: str) -> None:
    if isinstance(node, ast.If | ast.IfExp):
        negated = ast.UnaryOp(ast.Not(), node.test)
        node.test = negated if change == "condition negated" else ast.Constant(False)
    elif isinstance(node, ast.Compare):
        node.ops = [_WEAKER[type(node.ops[0])]()]
    elif isinstance(node, ast.Return) and node.value is not None:
        constants = {"predicate always true": True, "predicate always false": False}
        if change in constants:
            node.value = ast.Constant(constants[change])
        else:
            factor = WEAKENED if change == "bound weakened" else 0.0
            node.value = ast.BinOp(node.value, ast.Mult(), ast.Constant(factor))


def notice(mutant: Mutant, folder: Path, baseline: str, tests: tuple[str, ...]) -> str:
    """What notices the mutant, in one line; empty where nothing does. ``baseline``: what goes well without it."""
    for package, root in ROOTS.items():
        _mirror(root, folder / package, skip=mutant.file if package == mutant.package else "")
        if (beside := root.parent / "SPEC.md").exists():
            (folder / beside.name).symlink_to(beside)  # a test compares the generated specification with it
    (folder / mutant.package / mutant.file).write_text(mutant.source, encoding="utf-8")
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    commands = {
        "faults": [sys.executable, "-m", "moe_conformance.faults.mutation", "--probe", baseline],
        "tests": [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
    }
    for name, command in commands.items():
        if name == "tests" and not tests:
            continue
        try:
            run = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"{name}: no end after {LONGEST_S:.0f} s"
        if run.returncode:
            lines = (run.stdout.strip() or run.stderr.strip() or "(nothing said)").splitlines()
            return f"{name}: {lines[-1][:200]}"
    return ""


def _unchanged() -> Mutant:
    """No mutant at all: the first target as it is."""
    package, file = TARGETS[0]
    return Mutant(package, file, 0, "none", (ROOTS[package] / file).read_text(encoding="utf-8"))


def _mirror(root: Path, target: Path, skip: str) -> None:
    """The package as links, but for the file that is mutated and the folders that lead to it."""
    target.mkdir()
    for entry in root.iterdir():
        if entry.name == "__pycache__":
            continue
        first, _, rest = skip.partition("/")
        if entry.name == first:
            if rest:
                _mirror(entry, target / first, rest)
            continue
        (target / entry.name).symlink_to(entry)


def killed_at_once() -> list[str]:
    """The faults that their own clause's smoke cases kill: the others need larger cases, or more of them."""
    from moe_conformance.faults.catalogue import faults
    from moe_conformance.faults.execution import run_fault

    results = {name: run_fault(fault, quick=True, escalate=False) for name, fault in faults().items()}
    return [name for name, result in results.items() if result.verdict == "killed"]


def probe(baseline: list[str]) -> int:
    """Every fault of the baseline until its first failure, then the correct variants; 1 where one goes wrong."""
    from moe_conformance.faults.catalogue import faults, variants
    from moe_conformance.faults.execution import run_fault, run_variant

    for name in baseline:
        fault = faults()[name]
        result = run_fault(fault, quick=True, escalate=False)
        if result.verdict != "killed":
            print(f"{result.verdict}: {fault.id} ({fault.clause})")
            return 1
    for variant in variants().values():
        if alarms := run_variant(variant).false_alarms:
            print(f"false alarm: {variant.id}: {alarms[0][:120]}")
            return 1
    return 0


def main(arguments: list[str]) -> int:
    """Runs the mutants and prints the kill rate and every survivor; 0 whatever it is, since survivors are
    explained; 2 where something fails without a mutant."""
    parser = argparse.ArgumentParser(prog="moe_conformance.faults.mutation", description=__doc__)
    parser.add_argument("--probe", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th mutant")
    parser.add_argument("--only", default="", metavar="FILE", help="only mutants of files that end so")
    parser.add_argument("--tests", nargs="*", default=[], metavar="PATH", help="self-tests that may notice, too")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("-n", type=int, default=usable_cores(), metavar="WORKERS", help="mutants at a time")
    options = parser.parse_args(arguments)
    if options.probe:
        return probe(json.loads(Path(options.probe).read_text(encoding="utf-8")))
    handle, baseline = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    known = killed_at_once()
    Path(baseline).write_text(json.dumps(known), encoding="utf-8")
    print(f"{len(known)} faults are killed by their clause's smoke cases; each mutant has to leave that so", flush=True)
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        if wrong := notice(_unchanged(), Path(folder), baseline, tuple(options.tests)):
            print(f"something fails without a mutant, so nothing would be told by one: {wrong}", file=sys.stderr)
            return 2
    chosen = [m for target in TARGETS if target[1].endswith(options.only) for m in mutants(*target)][:: options.every]

    def one(mutant: Mutant) -> str:
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            noticed = notice(mutant, Path(folder), baseline, tuple(options.tests))
        print(f"{'killed' if noticed else 'SURVIVED':8}  {mutant.place}  {mutant.change}  {noticed}", flush=True)
        return noticed

    with ThreadPoolExecutor(options.n) as pool:
        found = list(pool.map(one, chosen))
    Path(baseline).unlink()
    by_file = Counter(mutant.file for mutant, noticed in zip(chosen, found, strict=True) if not noticed)
    killed = sum(map(bool, found))
    print(f"{killed} of {len(found)} mutants killed; survivors by file: {dict(by_file)}")
    if options.json:
        rows = [{**asdict(m), "source": "", "noticed": noticed} for m, noticed in zip(chosen, found, strict=True)]
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
