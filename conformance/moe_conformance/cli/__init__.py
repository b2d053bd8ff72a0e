"""The command line, ``moe-conformance``."""

from moe_conformance.cli.app import main

__all__ = ["main"]
