"""What the fused CUDA consumer has to reach, as numbers, and which of them a result of the bench shows as reached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from moe_conformance.bench.model import BenchResult, BenchRow, Cache, Mode

SUBJECT = "cuda"
"""The consumer whose goals these are, launched without programmatic dependent launch, as its rivals are."""
FUSED, SPLIT, LOCAL, COMPILED = "flashinfer-fused", "triton-split", "triton-local", "compile-local"
HIDDEN_SIZE, TOP_K, DTYPE = 7168, 8, "bfloat16"
"""The sizes of DeepSeek-V3 (its public configuration), for which the goals were set, but where one names others."""
NO_LIMIT = 2**62
EXCHANGE_PER_RANK = 3
"""Tensors [T, H] that a one-shot exchange moves for each peer: the push, the read of what came, the re-arming."""
ONE_GPU = "the bench runs on one GPU"
TESTS = "not a time: backends/tests/test_cuda_values.py and test_cuda_protocol.py on a GPU"


class Status(StrEnum):
    """What a result says about a goal."""

    MET = "met"
    MISSED = "**missed**"
    UNKNOWN = "not measured"


@dataclass(frozen=True)
class Setting:
    """Where a goal is looked for: everything of a point but its tokens."""

    mode: Mode
    cache: Cache
    ranks: int
    hidden_size: int = HIDDEN_SIZE

    def key(self, tokens: int) -> tuple[object, ...]:
        """As Timings finds its rows."""
        return self.mode, self.cache, self.ranks, self.hidden_size, tokens


class Timings:
    """The rows of a result by consumer and point; of the goals' top-k and dtype alone."""

    def __init__(self, result: BenchResult) -> None:
        """Of one result."""
        self.result = result
        self._rows: dict[tuple[object, ...], BenchRow] = {}
        for row in result.rows:
            if row.median_us is not None and (row.top_k, row.dtype) == (TOP_K, DTYPE):
                self._rows[row.consumer, *Setting(row.mode, row.cache, row.ranks, row.hidden_size).key(row.tokens)] = (
                    row
                )

    def tokens(self, setting: Setting) -> list[int]:
        """The token counts at which the subject was timed, ascending."""
        return sorted({row.tokens for key, row in self._rows.items() if key == (SUBJECT, *setting.key(row.tokens))})

    def row(self, consumer: str, setting: Setting, tokens: int) -> BenchRow | None:
        """None where that was not timed."""
        return self._rows.get((consumer, *setting.key(tokens)))

    def median(self, consumer: str, setting: Setting, tokens: int) -> float | None:
        """Microseconds; None where that was not timed."""
        row = self.row(consumer, setting, tokens)
        return None if row is None else row.median_us


Measure = Callable[[Timings, Setting, int], float | None]
"""A figure at one token count; None where the result lacks what it is made of."""


@dataclass(frozen=True)
class Goal:
    """A bound on a figure, over every measured token count from ``low`` to ``high``."""

    setting: Setting
    low: int
    high: int
    against: str
    measure: Measure
    bound: float
    at_least: bool = False
    """Whether ``bound`` is the smallest figure allowed, not the largest."""
    form: str = ".2f"
    """How the figure and its bound are printed."""
    stretch: bool = False
    """Wished for, not demanded."""


@dataclass(frozen=True)
class Finding:
    """One line of the table of goals."""

    where: str
    tokens: str
    goal: str
    seen: str
    status: Status


def check_goals(result: BenchResult, goals: tuple[Goal, ...]) -> list[Finding]:
    """One finding for each goal, in their order; of several token counts the worst is shown, and all are named."""
    timings = Timings(result)
    return [_check(goal, timings) for goal in goals]


def _check(goal: Goal, timings: Timings) -> Finding:
    seen = {}
    for tokens in timings.tokens(goal.setting):
        if goal.low <= tokens <= goal.high:
            figure = goal.measure(timings, goal.setting, tokens)
            if figure is not None:
                seen[tokens] = figure
    text, status = "", Status.UNKNOWN
    if seen:
        worst = (min if goal.at_least else max)(seen, key=lambda tokens: seen[tokens])
        fits = seen[worst] >= goal.bound if goal.at_least else seen[worst] <= goal.bound
        status = Status.MET if fits else Status.MISSED
        text = _told(seen, worst, goal)
    return Finding(_where(goal.setting), _range(goal), _asked(goal), text, status)


def _told(seen: dict[int, float], worst: int, goal: Goal) -> str:
    figure = format(seen[worst], goal.form)
    if goal.low == goal.high:
        return figure
    return f"{figure} at T={worst}, the worst of {', '.join(map(str, seen))}"


def _where(setting: Setting) -> str:
    size = "" if setting.hidden_size == HIDDEN_SIZE else f", H {setting.hidden_size}"
    return f"{setting.mode}, {setting.cache}, N={setting.ranks}{size}"


def _range(goal: Goal) -> str:
    if goal.low == goal.high:
        return str(goal.low)
    if goal.high == NO_LIMIT:
        return "all" if goal.low == 1 else f"from {goal.low}"
    return f"{goal.low} to {goal.high}"


def _asked(goal: Goal) -> str:
    sign = "at least" if goal.at_least else "at most"
    return f"{goal.against}: {sign} {format(goal.bound, goal.form)}{' (stretch)' if goal.stretch else ''}"
