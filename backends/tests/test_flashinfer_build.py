"""FlashInfer's header compiles behind our C functions; needs nvcc and the header, no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from moe_backends.flashinfer_tail import header, plan
from moe_backends.flashinfer_tail.build import WORLD_SIZES, compile_command, find_headers
from moe_backends.jit.toolchain import find_nvcc
from moe_contract import UnsupportedError


def _lack() -> str:
    try:
        find_headers()
        find_nvcc()
    except UnsupportedError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(_lack()), reason=_lack() or "nothing is missing")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The library for sm_90a, and what the compiler said of each kernel."""
    target = tmp_path_factory.mktemp("flashinfer") / "tail.so"
    command = [*compile_command(find_headers(), "90a", target), "-Xptxas", "-v"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target, done.stderr + done.stdout


def test_every_kernel_has_the_registers_that_room_is_estimated_from(compiled: tuple[Path, str]) -> None:
    """Eight kernels, none with more registers than plan.REGISTERS says for its ranks, none with spills."""
    pattern = r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
    found = {name: (int(spilled), int(used)) for name, spilled, used in re.findall(pattern, compiled[1], re.S)}
    assert len(found) == 2 * len(WORLD_SIZES)
    for name, (spilled, used) in found.items():
        match = re.search(r"Li(\d+)E", name)
        assert match is not None
        assert used <= plan.REGISTERS[int(match[1])] and spilled == 0, name


def test_the_library_loads_and_depends_on_no_python(compiled: tuple[Path, str]) -> None:
    """One file serves every version of Python and torch; without a GPU the kernel says what is missing."""
    assert b"PyObject" not in compiled[0].read_bytes()
    library = header.open_library(compiled[0])
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="loading the kernel: "):
            header.HeaderKernel(library, torch.bfloat16, 2)
