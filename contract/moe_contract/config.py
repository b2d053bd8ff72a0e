"""The deferral config: when a producer may hand over an unfinalized output."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator


class MoEConfig(BaseModel):
    """What an engine tells a producer about deferral. Read it at the call, never at construction (DEFER-2)."""

    model_config = ConfigDict(validate_assignment=True, extra="forbid")

    defer_moe_finalize: bool = False
    """The engine opts in to unfinalized outputs."""
    tp_size: int = Field(default=1, ge=1)
    """Ranks in the group over which the tail reduces (expert-parallel ranks of the same layer included)."""
    ep_size: int = Field(default=1, ge=1)
    """How many of those ranks hold different experts; divides ``tp_size``."""
    max_deferred_tokens: int | None = Field(default=None, ge=0)
    """The cap: the largest number of tokens that the consumer's workspace holds; None for no cap."""

    @model_validator(mode="after")
    def _ep_divides_tp(self) -> MoEConfig:
        if self.tp_size % self.ep_size:
            raise ValueError(f"ep_size {self.ep_size} must divide tp_size {self.tp_size}")
        return self

    @property
    def use_deferred_moe_finalize(self) -> bool:
        """Deferral is opted in and there is a reduction to fuse with."""
        return self.defer_moe_finalize and self.tp_size > 1

    def should_defer(self, num_tokens: int) -> bool:
        """Whether a call with ``num_tokens`` tokens defers (DEFER-1): opted in, tp_size > 1, 0 < T <= cap."""
        within_cap = self.max_deferred_tokens is None or num_tokens <= self.max_deferred_tokens
        return self.use_deferred_moe_finalize and num_tokens > 0 and within_cap
