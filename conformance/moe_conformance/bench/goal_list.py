"""The goals themselves: those of one GPU as bounds on a result, the others by name, so that none goes missing."""

from __future__ import annotations

from moe_conformance.bench.goals import (
    COMPILED,
    EXCHANGE_PER_RANK,
    FUSED,
    LOCAL,
    NO_LIMIT,
    ONE_GPU,
    SPLIT,
    SUBJECT,
    TESTS,
    TOP_K,
    Finding,
    Goal,
    Measure,
    Setting,
    Status,
    Timings,
    check_goals,
)
from moe_conformance.bench.model import BenchResult, Cache, Mode

HOST_CALL_US = 10.0
"""Most that one eager call may cost the host."""
SPREAD = 1.10
"""Largest time per token over the smallest, from 1024 to 16384 tokens: the cost grows linearly."""
LINEAR = (1024, 16384)


def ratio_to(*rivals: str) -> Measure:
    """The subject's median over the lowest of the rivals'."""

    def measure(timings: Timings, setting: Setting, tokens: int) -> float | None:
        own = timings.median(SUBJECT, setting, tokens)
        others = [us for rival in rivals if (us := timings.median(rival, setting, tokens)) is not None]
        return own / min(others) if own is not None and len(others) == len(rivals) else None

    return measure


def speedup_over(rival: str) -> Measure:
    """How many times faster the subject is."""

    def measure(timings: Timings, setting: Setting, tokens: int) -> float | None:
        own, other = (timings.median(name, setting, tokens) for name in (SUBJECT, rival))
        return None if own is None or other is None else other / own

    return measure


def share_of_copy(tensors_per_peer: int = 0) -> Measure:
    """Effective bytes, and so many tensors [T, H] for each peer, over time and copy bandwidth."""

    def measure(timings: Timings, setting: Setting, tokens: int) -> float | None:
        row = timings.row(SUBJECT, setting, tokens)
        if row is None or row.median_us is None:
            return None
        moved = row.effective_bytes * (1 + tensors_per_peer * (setting.ranks - 1) / (TOP_K + 4))
        return moved / row.median_us / 1e6 / timings.result.copy_tbps

    return measure


def empty_nodes(timings: Timings, setting: Setting, tokens: int) -> float | None:
    """The subject's median in units of an empty graph node."""
    own = timings.median(SUBJECT, setting, tokens)
    return None if own is None else own / timings.result.empty_node_us


def past_local(timings: Timings, setting: Setting, tokens: int) -> float | None:
    """Microseconds more than the Triton kernel of one rank, which exchanges nothing, at the same size."""
    own = timings.median(SUBJECT, setting, tokens)
    local = timings.median(LOCAL, Setting(setting.mode, setting.cache, 1, setting.hidden_size), tokens)
    return None if own is None or local is None else own - local


def time_per_token(timings: Timings, setting: Setting, tokens: int) -> float | None:
    """Largest over smallest time per token in LINEAR, told at its upper end; None unless both ends were timed."""
    if tokens != LINEAR[1] or timings.median(SUBJECT, setting, LINEAR[0]) is None:
        return None
    counts = [count for count in timings.tokens(setting) if LINEAR[0] <= count <= LINEAR[1]]
    each = [us / count for count in counts if (us := timings.median(SUBJECT, setting, count)) is not None]
    return max(each) / min(each)


COLD2, WARM2 = (Setting(Mode.SOLO, cache, 2) for cache in (Cache.COLD, Cache.WARM))
COLD1, WARM1 = (Setting(Mode.SOLO, cache, 1) for cache in (Cache.COLD, Cache.WARM))
JOIN2 = Setting(Mode.JOIN, Cache.COLD, 2)
WIDTHS = tuple(Setting(Mode.SOLO, Cache.COLD, 2, hidden_size) for hidden_size in (2048, 4096))


def _against(setting: Setting, bounds: dict[int, float], rival: str = FUSED) -> list[Goal]:
    return [Goal(setting, t, t, f"times {rival}", ratio_to(rival), bound) for t, bound in bounds.items()]


def _share(setting: Setting, low: int, high: int, bound: float, exchange: bool = False) -> Goal:
    text, tensors = ("of copy, exchange counted", EXCHANGE_PER_RANK) if exchange else ("of copy, effective bytes", 0)
    return Goal(setting, low, high, text, share_of_copy(tensors), bound, at_least=True, form=".0%")


def _faster(setting: Setting, tokens: int, rival: str, bound: float) -> Goal:
    return Goal(setting, tokens, tokens, f"times faster than {rival}", speedup_over(rival), bound, at_least=True)


NODES, MORE, SLOWER = "empty graph nodes", f"us more than {LOCAL} at N=1", f"times the faster of {LOCAL} and {COMPILED}"
LARGE = ((1024, 1024), (1025, NO_LIMIT))
"""Large calls; apart, so that a result without the larger ones does not pass for one with them."""
GOALS: tuple[Goal, ...] = (
    *_against(COLD2, {1: 0.80, 2: 0.80}),
    *_against(WARM2, {1: 0.70, 2: 0.70}),
    Goal(WARM2, 1, 1, NODES, empty_nodes, 6.0),
    *(Goal(COLD2, tokens, tokens, MORE, past_local, 1.0, stretch=True) for tokens in (1, 2)),
    *_against(COLD2, {8: 0.70, 16: 0.70, 64: 0.45, 128: 0.30}),
    _faster(COLD2, 64, SPLIT, 1.8),
    _faster(COLD2, 128, SPLIT, 2.2),
    *(Goal(COLD2, *large, f"times {FUSED}", ratio_to(FUSED), 0.23) for large in LARGE),
    *(_share(COLD2, *large, 0.70) for large in LARGE),
    *(_share(COLD2, *large, 0.85, exchange=True) for large in LARGE),
    *_against(JOIN2, {1: 0.75, 2: 0.70, 8: 0.70, 16: 0.70, 128: 0.45, 1024: 0.40}),
    *(_faster(width, 1024, FUSED, 8.0) for width in WIDTHS),
    _share(COLD1, 1024, 1024, 0.85),
    _share(COLD1, 4096, NO_LIMIT, 0.97),
    *(Goal(setting, 1, NO_LIMIT, SLOWER, ratio_to(LOCAL, COMPILED), 1.0) for setting in (COLD1, WARM1)),
    Goal(COLD2, LINEAR[1], LINEAR[1], "spread of the time per token from T=1024", time_per_token, SPREAD),
)
REAL = "two GPUs, cold"
BEST = "times the best other"
ELSEWHERE = (
    *((REAL, tokens, f"{BEST}: at most {bound}", ONE_GPU)
      for tokens, bound in (("1", "0.78"), ("16", "0.78"), ("128", "0.65"), ("1024", "0.70"))),
    (REAL, "above 1024", "of the larger limit, link or memory: at least 80%", ONE_GPU),
    *(("accuracy", "all", asked, TESTS)
      for asked in ("residual has the bits of profile C's emulation", "norm within 1 ulp", "ranks alike in every bit",
                    "runs alike in every bit")),
)  # fmt: skip
"""Goals that no result of the bench can show, and why: where, tokens, goal, reason."""


def all_findings(result: BenchResult) -> list[Finding]:
    """Every goal, whatever became of it."""
    unknown = [Finding(where, tokens, asked, reason, Status.UNKNOWN) for where, tokens, asked, reason in ELSEWHERE]
    return [*check_goals(result, GOALS), _host(result), *unknown]


def _host(result: BenchResult) -> Finding:
    """The host's share of an eager call."""
    us = result.host_call_us.get(SUBJECT)
    status = Status.UNKNOWN if us is None else Status.MET if us <= HOST_CALL_US else Status.MISSED
    seen = "" if us is None else f"{us:.1f}"
    return Finding("eager call, N=1", "1", f"us of the host: at most {HOST_CALL_US:.1f}", seen, status)
