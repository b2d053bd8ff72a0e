"""How much is run: which shapes a test's variants are laid over."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from moe_conformance.cases.models import Model, models
from moe_contract.plugin_errors import nearest

PROFILE_NAMES = ("smoke", "core", "full")
MODEL_PREFIX = "model:"


class ProfileError(ValueError):
    """Unknown or impossible profile; the message is one line for the user."""


@dataclass(frozen=True)
class LayerLimits:
    """How large a layer may be: its oracle costs T * K * H * I in float64."""

    tokens: int
    hidden_size: int
    num_experts: int
    """Fewest experts; there are at least twice as many as top-k takes."""
    intermediate_size: int


@dataclass(frozen=True)
class Axes:
    """The values that shapes are drawn from."""

    tokens: tuple[int, ...]
    top_k: tuple[int, ...]
    hidden_size: tuple[int, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float16")

    def within(self, limits: LayerLimits) -> Axes:
        """The axes without the values that are too large for a layer; the limit itself takes their place.

        The covering array fills places that no pair needs with an axis' last value: for layers that is bfloat16, which
        every producer computes in; float16, which some do not, is left where a pair asks for it.
        """
        return replace(
            self,
            dtypes=self.dtypes[::-1],
            tokens=_at_most(self.tokens, limits.tokens),
            hidden_size=_at_most(self.hidden_size, limits.hidden_size),
        )


def _at_most(values: tuple[int, ...], limit: int) -> tuple[int, ...]:
    return tuple(dict.fromkeys(min(value, limit) for value in values))


@dataclass(frozen=True)
class Profile:
    """A named amount of work: the axes that shapes for tails and layers are drawn from."""

    name: str
    few: Axes
    wide: Axes
    layers: LayerLimits
    tail_elements: int = 2**20
    """Most T * K * H * N elements of one synthetic case; larger combinations get fewer tokens. A case of 2^20 takes
    about 0.1 s on one CPU core."""
    few_layers: Axes | None = None
    """The axes of layers in tests with few shapes, where they are not ``few``."""
    wide_layers: Axes | None = None
    """The same for ``wide``."""
    every_variant: bool = False
    """Every variant on every shape. Otherwise a variant is one more axis of the covering array: it meets every value
    of every other axis, but not every combination of two of them."""
    emulations: bool = True
    """Whether emulations take part where no backend is named: they are slow where real kernels are quick."""
    model: Model | None = None
    reductions: tuple[str, ...] = ()
    """What was cut down from the real model, for the report."""

    @property
    def default_ranks(self) -> tuple[int, ...]:
        """Every tensor-parallel size that a run without ``--tp`` has; layers may be on fewer."""
        return self.few.ranks


SMOKE = Profile(
    "smoke",
    emulations=False,
    tail_elements=2**19,
    layers=LayerLimits(tokens=9, hidden_size=512, num_experts=16, intermediate_size=32),
    few=Axes(tokens=(5,), top_k=(4,), hidden_size=(256,), ranks=(1, 2), dtypes=("bfloat16",)),
    wide=Axes(tokens=(1, 17), top_k=(3, 8), hidden_size=(256, 2688), ranks=(1, 2)),
)
CORE = Profile(
    "core",
    layers=LayerLimits(tokens=17, hidden_size=2880, num_experts=16, intermediate_size=32),
    # 960: 120 vectors of 16 bytes, which fill no whole number of warps, so that a tail's last ones are partly idle.
    few=Axes(tokens=(2, 17), top_k=(3, 8), hidden_size=(256, 960), ranks=(1, 2, 4, 8, 16)),
    # 768: no power of two either, and a multiple of 256. Producers that pad to 128 or 256 finalize a layer of 960, so
    # that most of their cases would be about finalized outputs; a padded width is a variant of DEFER-3 and ROWS-4.
    few_layers=Axes(tokens=(2, 17), top_k=(3, 8), hidden_size=(256, 768), ranks=(1, 2, 4, 8)),
    # Layers on 16 ranks, each of which runs its own part, took half of all producers' time: they are left to `full`.
    wide_layers=Axes(
        tokens=(1, 2, 5, 8, 17),
        top_k=(1, 2, 3, 4, 6, 8, 10, 16, 22),
        hidden_size=(256, 1024, 2304, 2880),
        ranks=(1, 2, 4, 8),
    ),
    wide=Axes(
        tokens=(1, 2, 5, 8, 17, 33, 65, 127, 129),
        top_k=(1, 2, 3, 4, 6, 8, 10, 16, 22),
        hidden_size=(256, 1024, 2048, 2304, 2688, 2880, 3584, 7168),
        ranks=(1, 2, 4, 8, 16),
    ),
)
FULL = Profile(
    "full",
    tail_elements=2**24,
    every_variant=True,
    layers=LayerLimits(tokens=1024, hidden_size=8192, num_experts=64, intermediate_size=128),
    few=Axes(
        tokens=(1, 2, 5, 17, 128, 129),
        top_k=(1, 3, 4, 8, 22),
        hidden_size=(256, 2048, 2880, 7168),
        ranks=(1, 2, 4, 8, 16),
    ),
    wide=Axes(
        tokens=(1, 2, 5, 8, 16, 17, 33, 65, 127, 128, 129, 256, 1024, 4096),
        top_k=(1, 2, 3, 4, 6, 8, 10, 16, 22, 32),
        hidden_size=(256, 1024, 2048, 2304, 2688, 2880, 3072, 3584, 4096, 5120, 6144, 7168, 8192),
        ranks=(1, 2, 4, 8, 16),
    ),
)
_FIXED = {profile.name: profile for profile in (SMOKE, CORE, FULL)}


def get_profile(name: str) -> Profile:
    """The profile called ``name``; raises ProfileError with the nearest known one."""
    if name in _FIXED:
        return _FIXED[name]
    if name.startswith(MODEL_PREFIX):
        return _model_profile(name)
    raise ProfileError(_unknown("profile", name, [*PROFILE_NAMES, *(MODEL_PREFIX + model for model in models())]))


def _model_profile(name: str) -> Profile:
    model = models().get(name.removeprefix(MODEL_PREFIX))
    if model is None:
        raise ProfileError(_unknown("model", name.removeprefix(MODEL_PREFIX), list(models())))
    sizes: dict[str, Any] = {
        "top_k": (model.top_k,),
        "hidden_size": (model.hidden_size,),
        "ranks": model.tp,
        "dtypes": ("bfloat16",),
    }
    reductions: tuple[str, ...] = ()
    if model.reduced_intermediate_size != model.intermediate_size:
        reductions = (
            f"intermediate size {model.reduced_intermediate_size} instead of {model.intermediate_size}: the experts' "
            "weights would not fit in memory; hidden size, experts, top-k and routing are the model's own",
        )
    return Profile(
        name,
        few=Axes(tokens=(2,), **sizes),
        wide=Axes(tokens=(1, 2, 17), **sizes),
        layers=LayerLimits(17, model.hidden_size, model.num_experts, model.reduced_intermediate_size),
        model=model,
        reductions=reductions,
    )


def _unknown(what: str, name: str, known: list[str]) -> str:
    return f"unknown {what} {name!r}{nearest(name, known)} (known: {', '.join(known)})"
