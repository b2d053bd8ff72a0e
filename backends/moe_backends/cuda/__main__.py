"""``python -m moe_backends.cuda build``: compiles ahead of time what first use would compile."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from moe_backends.jit.cache import cache_dir
from moe_backends.jit.toolchain import ARCHITECTURES, architecture_of
from moe_contract import UnsupportedError

from .build import DTYPES, WORLD_SIZES, Variant, build


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; 0 on success, 1 with one line on the error stream otherwise."""
    parser = argparse.ArgumentParser(prog="python -m moe_backends.cuda", description=__doc__)
    command = parser.add_subparsers(dest="command", required=True).add_parser("build", help="compile the kernels")
    command.add_argument("--arch", choices=sorted(ARCHITECTURES.values()), help="default: this machine's GPU")
    command.add_argument("--dtype", choices=sorted(DTYPES), action="append", help="default: all")
    command.add_argument("--ranks", type=int, choices=WORLD_SIZES, action="append", help="default: all")
    command.add_argument("--jobs", type=int, default=1, help="compilations at a time")
    command.add_argument("--test-hooks", action="store_true", help="the build with stalls, for the RED-5 tests")
    chosen = parser.parse_args(arguments)
    try:
        target = chosen.arch or architecture_of(torch.device("cuda"))
        variants = [
            Variant(dtype, ranks, target, chosen.test_hooks)
            for dtype in chosen.dtype or DTYPES
            for ranks in chosen.ranks or WORLD_SIZES
        ]
        with ThreadPoolExecutor(chosen.jobs) as pool:
            for library in pool.map(build, variants):
                print(library.name)
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"in {cache_dir()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
