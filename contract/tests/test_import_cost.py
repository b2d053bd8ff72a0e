"""Importing the contract costs torch and pydantic, and no more."""

from __future__ import annotations

import subprocess
import sys

import moe_contract

PROGRAM = """
import sys, torch, pydantic
pydantic.create_model('Any', field=(int, 0))  # loads what pydantic puts off until its first model
before, opened = set(sys.modules), []
def note(event, arguments):
    if event == 'open' and not str(arguments[0]).endswith(('.py', '.pyc')):
        opened.append(str(arguments[0]))
    elif event in ('subprocess.Popen', 'socket.connect', 'ctypes.dlopen'):
        opened.append(event)
sys.addaudithook(note)
import moe_contract
new = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
print(sorted(new), opened, torch.cuda.is_initialized())
"""


def test_import_brings_in_nothing_else_and_does_no_work() -> None:
    """No package beside torch and pydantic is loaded, no file read but modules, no program, library or GPU asked."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['moe_contract'] [] False"


def test_public_names_are_all_there() -> None:
    """Everything in __all__ exists, once."""
    names = moe_contract.__all__
    assert len(names) == len(set(names))
    assert all(hasattr(moe_contract, name) for name in names)
