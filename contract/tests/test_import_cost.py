"""Importing the contract costs torch and pydantic, and no more."""

from __future__ import annotations

import subprocess
import sys

import moe_contract

PROGRAM = """
import sys, time, torch, pydantic
before = set(sys.modules)
start = time.process_time()
import moe_contract
spent = time.process_time() - start
new = {name.partition('.')[0] for name in set(sys.modules) - before}
print(sorted(new & {'flashinfer', 'vllm', 'typer', 'pytest', 'rich', 'triton', 'numpy'}))
print(moe_contract.clauses.registry.cache_info().currsize)
print(spent)
"""


def test_import_brings_in_nothing_heavy_and_reads_no_file() -> None:
    """No engine, no command line, no test runner; the registry is read when it is first asked for."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    heavy, registries_read, seconds = result.stdout.split("\n")[:3]
    assert (heavy, registries_read) == ("[]", "0")
    # Measured 0.1 s beside torch and pydantic; ten times that is an import that does work.
    assert float(seconds) < 1.0


def test_public_names_are_all_there() -> None:
    """Everything in __all__ exists, once, in order of constants, classes, functions."""
    names = moe_contract.__all__
    assert len(names) == len(set(names))
    assert all(hasattr(moe_contract, name) for name in names)
