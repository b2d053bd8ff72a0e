"""``python -m moe_backends.flashinfer_tail build``: compiles ahead of time, for this machine or to be taken along."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from moe_backends.jit.toolchain import ARCHITECTURES, architecture_of
from moe_contract import UnsupportedError

from .build import LIBRARY_VARIABLE, compile_library, find_headers, library_path


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 0 on success, 1 with one line on the error stream otherwise."""
    parser = argparse.ArgumentParser(prog="python -m moe_backends.flashinfer_tail", description=__doc__)
    command = parser.add_subparsers(dest="command", required=True).add_parser("build", help="compile the kernel")
    command.add_argument("--arch", choices=sorted(ARCHITECTURES.values()), help="default: this machine's GPU")
    command.add_argument("--output", type=Path, help=f"a file for {LIBRARY_VARIABLE} elsewhere; default: the cache")
    chosen = parser.parse_args(arguments)
    try:
        target = chosen.arch or architecture_of(torch.device("cuda"))
        output: Path | None = chosen.output
        print(library_path(target) if output is None else compile_library(find_headers(), target, output))
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
