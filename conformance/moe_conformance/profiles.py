"""How much is run: which shapes a test's variants are laid over."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allpairspy import AllPairs

from moe_conformance.cases import LayerCase, TailCase
from moe_conformance.marks import Breadth, ConformanceTest
from moe_conformance.models import Model, models

PROFILE_NAMES = ("smoke", "core", "full")
MODEL_PREFIX = "model:"
TAIL_ELEMENTS = {"smoke": 2**19, "core": 2**20, "full": 2**24}
"""Most T * K * H * N elements of one synthetic case; larger combinations get fewer tokens. At core a case of this size
takes about 0.1 s on one CPU core."""
Fields = dict[str, Any]


class ProfileError(ValueError):
    """Unknown or impossible profile; the message is one line for the user."""


@dataclass(frozen=True)
class Axes:
    """The values that shapes are drawn from."""

    tokens: tuple[int, ...]
    top_k: tuple[int, ...]
    hidden_size: tuple[int, ...]
    ranks: tuple[int, ...]
    dtypes: tuple[str, ...] = ("bfloat16", "float16")


@dataclass(frozen=True)
class Profile:
    """A named amount of work: shapes for tails and for layers."""

    name: str
    default_ranks: tuple[int, ...]
    few: Axes
    wide: Axes
    model: Model | None = None
    reductions: tuple[str, ...] = ()
    """What was cut down from the real model, for the report."""

    def cases(self, test: ConformanceTest, ranks: Sequence[int] | None, seed: int) -> list[Any]:
        """The cases of one test: each of its variants on each shape that it can say something about."""
        chosen = tuple(ranks or self.default_ranks)
        make = _tail_cases if test.kind == "consumer" else _layer_cases
        found = {case.id: case for case in make(self, test, chosen, seed) if test.where is None or test.where(case)}
        return list(found.values())

    def shapes(self, breadth: Breadth, ranks: tuple[int, ...]) -> list[Fields]:
        """Sizes that cover every pair of values of the axes; T is lowered where T * K * H * N would be too large."""
        axes = self.few if breadth == "few" else self.wide
        budget = TAIL_ELEMENTS.get(self.name, TAIL_ELEMENTS["core"])
        values = [ranks, axes.tokens, axes.top_k, axes.hidden_size, axes.dtypes]
        names = ("ranks", "tokens", "top_k", "hidden_size", "dtype")
        shapes = [dict(zip(names, row, strict=True)) for row in _pairwise(values)]
        return [shape | {"tokens": _fitting(shape, axes.tokens, budget)} for shape in shapes]


def _pairwise(values: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Rows in which every two values of two axes meet. Axes of one value are left out of the search and put back."""
    varied = [axis for axis in values if len(axis) > 1]
    if len(varied) < 2:
        rows = [[value] for value in varied[0]] if varied else [[]]
    else:
        rows = [list(row) for row in AllPairs([list(axis) for axis in varied])]
    result = []
    for row in rows:
        taken = iter(row)
        result.append([next(taken) if len(axis) > 1 else axis[0] for axis in values])
    return result


def _fitting(shape: Fields, tokens: Sequence[int], budget: int) -> int:
    most = budget // (shape["top_k"] * shape["hidden_size"] * shape["ranks"])
    wanted: int = shape["tokens"]
    return wanted if wanted <= most else max([t for t in tokens if 0 < t <= most], default=1)


def _tail_cases(profile: Profile, test: ConformanceTest, ranks: tuple[int, ...], seed: int) -> list[TailCase]:
    shapes = profile.shapes(test.breadth, ranks)
    return [TailCase(**{**shape, "seed": seed, **variant}) for variant in test.variants for shape in shapes]


LAYER_DEFAULTS: dict[str, Fields] = {
    "smoke": {"num_experts": 16, "intermediate_size": 32},
    "core": {"num_experts": 16, "intermediate_size": 32},
    "full": {"num_experts": 64, "intermediate_size": 128},
}
LAYER_HIDDEN = {"smoke": 512, "core": 2880, "full": 8192}
"""Widest layer of a profile: a layer's oracle costs T * K * H * I in float64."""
LAYER_TOKENS = {"smoke": 8, "core": 17, "full": 1024}


def _layer_cases(profile: Profile, test: ConformanceTest, ranks: tuple[int, ...], seed: int) -> list[LayerCase]:
    cases = []
    for variant in test.variants:
        for shape in profile.shapes(test.breadth, ranks):
            fields = _model_fields(profile.model) if profile.model else _layer_fields(profile.name, shape)
            merged = {**shape, "seed": seed, **fields, **variant}
            if "ep" in variant:
                merged["ep"] = min(merged["ranks"], variant["ep"])
            if merged["method"] == "llama4":
                merged["top_k"] = 1
            cases.append(LayerCase(**merged))
    return cases


def _layer_fields(name: str, shape: Fields) -> Fields:
    defaults = LAYER_DEFAULTS[name]
    experts = max(defaults["num_experts"], 2 * shape["top_k"])
    return defaults | {
        "method": "renormalize",
        "num_experts": -(-experts // 16) * 16,
        "hidden_size": min(shape["hidden_size"], LAYER_HIDDEN[name]),
        "tokens": min(shape["tokens"], LAYER_TOKENS[name]),
    }


def _model_fields(model: Model) -> Fields:
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.reduced_intermediate_size,
        "num_experts": model.num_experts,
        "top_k": model.top_k,
        "method": model.method,
        "num_groups": model.num_groups,
        "topk_groups": model.topk_groups,
        "activation": model.activation,
        "biases": model.biases,
        "scale": model.scale,
        "shared_intermediate_size": model.reduced_shared,
        "weight_bias": model.weight_bias,
        "precomputed_weights": model.precomputed_weights,
    }


SMOKE = Profile(
    "smoke",
    default_ranks=(1, 2),
    few=Axes(tokens=(5,), top_k=(4,), hidden_size=(256,), ranks=(1, 2), dtypes=("bfloat16",)),
    wide=Axes(tokens=(1, 17), top_k=(3, 8), hidden_size=(256, 2688), ranks=(1, 2)),
)
CORE = Profile(
    "core",
    default_ranks=(1, 2, 4, 8, 16),
    few=Axes(tokens=(2, 17), top_k=(3, 8), hidden_size=(256, 2880), ranks=(1, 2, 4, 8, 16)),
    wide=Axes(
        tokens=(1, 2, 5, 8, 17, 33, 65, 127, 129),
        top_k=(1, 2, 3, 4, 6, 8, 10, 16, 22),
        hidden_size=(256, 1024, 2048, 2304, 2688, 2880, 3584, 7168),
        ranks=(1, 2, 4, 8, 16),
    ),
)
FULL = Profile(
    "full",
    default_ranks=(1, 2, 4, 8, 16),
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


def model_names() -> tuple[str, ...]:
    """The models that ``model:NAME`` knows."""
    return tuple(models())


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
        default_ranks=model.tp,
        few=Axes(tokens=(2,), **sizes),
        wide=Axes(tokens=(1, 2, 17), **sizes),
        model=model,
        reductions=reductions,
    )


def _unknown(what: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    suggestion = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {name!r}{suggestion} (known: {', '.join(known)})"
