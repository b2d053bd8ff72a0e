"""The time limit of a case, which command, plugin, runner and harness share; nothing is imported for it."""

from __future__ import annotations

CASE_TIMEOUT_S = 60.0
"""Longest time a case may take, unless told otherwise, before its backend is said to hang. The slowest correct case,
the first compilation by torch.compile, took 26 s on a loaded machine; all others take about a second."""
