"""When a call defers: opted in, more than one rank, some tokens, within the cap; asked anew at every call."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from moe_contract import MoEConfig


def test_deferral_is_off_by_default() -> None:
    """An engine opts in."""
    config = MoEConfig()
    assert config.defer_moe_finalize is False and not config.use_deferred_moe_finalize


@pytest.mark.parametrize(("flag", "ranks", "expected"), [(True, 2, True), (True, 1, False), (False, 2, False)])
def test_deferral_needs_the_flag_and_a_reduction(flag: bool, ranks: int, expected: bool) -> None:
    """Either alone is not enough."""
    assert MoEConfig(defer_moe_finalize=flag, tp_size=ranks).use_deferred_moe_finalize is expected


def test_flag_is_read_when_asked() -> None:
    """Set after construction it takes effect, cleared it stops (DEFER-2); so does every other field."""
    config = MoEConfig(tp_size=2)
    assert not config.should_defer(1)
    config.defer_moe_finalize = True
    assert config.should_defer(1)
    config.max_deferred_tokens = 4
    assert config.should_defer(4) and not config.should_defer(5)
    config.tp_size = 1
    assert not config.use_deferred_moe_finalize
    config.tp_size = 2
    config.defer_moe_finalize = False
    assert not config.should_defer(1)


@pytest.mark.parametrize(
    ("cap", "tokens", "expected"),
    [(None, 10**9, True), (None, 0, False), (8, 0, False), (8, 8, True), (8, 9, False), (0, 1, False)],
)
def test_cap_is_the_last_size_that_defers(cap: int | None, tokens: int, expected: bool) -> None:
    """T = 0 never defers; T equal to the cap does, one more does not."""
    config = MoEConfig(defer_moe_finalize=True, tp_size=2, max_deferred_tokens=cap)
    assert config.should_defer(tokens) is expected


@pytest.mark.parametrize("wrong", [{"tp_size": 0}, {"ep_size": 0}, {"max_deferred_tokens": -1}, {"defer": True}])
def test_wrong_config_is_refused(wrong: dict[str, int]) -> None:
    """Ranges and names are checked, at construction and at assignment."""
    with pytest.raises(ValidationError):
        MoEConfig(**wrong)
    (name, value), *_ = wrong.items()
    with pytest.raises((ValidationError, ValueError)):
        setattr(MoEConfig(), name, value)


def test_expert_parallel_ranks_divide_the_group() -> None:
    """The message has both numbers."""
    assert MoEConfig(tp_size=8, ep_size=4).ep_size == 4
    with pytest.raises(ValidationError, match="ep_size 3 must divide tp_size 8"):
        MoEConfig(tp_size=8, ep_size=3)
