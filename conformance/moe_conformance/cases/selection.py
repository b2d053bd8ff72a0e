"""Which cases a test runs in a profile: its variants laid over the profile's sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from moe_conformance.cases.case import LayerCase, TailCase
from moe_conformance.cases.covering import Row, largest_fitting, pairwise
from moe_conformance.cases.models import Model
from moe_conformance.cases.profiles import Axes, Profile
from moe_conformance.marks import ConformanceTest

EXPERT_MULTIPLE = 16
"""The number of experts is a multiple of this, so that up to 16 expert-parallel ranks can share them."""
NEUTRAL: Row = {
    "biases": False,
    "scale": 1.0,
    "shared_intermediate_size": 0,
    "weight_bias": 0.0,
    "precomputed_weights": "activation",
    "num_groups": 1,
}
"""Values of a layer's features where they are switched off."""


def select_cases(profile: Profile, test: ConformanceTest, ranks: Sequence[int] | None, seed: int) -> list[Any]:
    """The cases of one test: its variants on the sizes that it can say something about, each once."""
    make = _tail_cases if test.kind == "consumer" else _layer_cases
    cases = make(profile, test, tuple(ranks or ()), seed)
    found = {case.id: case for case in cases if test.where is None or test.where(case)}
    return list(found.values())


def _tail_cases(profile: Profile, test: ConformanceTest, ranks: tuple[int, ...], seed: int) -> list[TailCase]:
    axes = profile.few if test.breadth == "few" else profile.wide
    cases = []
    for row in _rows(profile, axes, ranks, test.variants):
        variant = row.pop("variant")
        most = profile.tail_elements // (row["top_k"] * row["hidden_size"] * row["ranks"])
        row["tokens"] = largest_fitting(row["tokens"], axes.tokens, most)
        cases.append(TailCase(**{**row, "seed": seed, **variant}))
    return cases


def _layer_cases(profile: Profile, test: ConformanceTest, ranks: tuple[int, ...], seed: int) -> list[LayerCase]:
    axes = _layer_axes(profile, test)
    variants = test.variants
    if profile.model is not None:
        variants = tuple(variant for variant in variants if _says_something(variant, profile.model))
    cases = []
    for row in _rows(profile, axes, ranks, variants):
        variant = row.pop("variant")
        fields = {**row, "seed": seed, **_layer_fields(profile, row), **variant}
        if profile.model is not None:
            fields |= _model_fields(profile.model)
        if "ep" in variant:
            fields["ep"] = math.gcd(fields["ranks"], variant["ep"])
        if fields["method"] == "llama4":
            fields["top_k"] = 1
        cases.append(LayerCase(**fields))
    return cases


def _layer_axes(profile: Profile, test: ConformanceTest) -> Axes:
    few, wide = profile.few_layers or profile.few, profile.wide_layers or profile.wide
    return (few if test.breadth == "few" else wide).within(profile.layers)


def _rows(profile: Profile, axes: Axes, ranks: tuple[int, ...], variants: Sequence[Row]) -> list[Row]:
    """Sizes with a variant each, under the key ``variant``. No ``ranks``: those of the axes."""
    if not variants:
        return []
    sizes = {
        "ranks": ranks or axes.ranks,
        "tokens": axes.tokens,
        "top_k": axes.top_k,
        "hidden_size": axes.hidden_size,
        "dtype": axes.dtypes,
    }
    if profile.every_variant:
        return [{**row, "variant": variant} for variant in variants for row in pairwise(sizes)]
    return pairwise({**sizes, "variant": tuple(variants)})


def _layer_fields(profile: Profile, row: Row) -> Row:
    limits = profile.layers
    experts = max(limits.num_experts, 2 * row["top_k"])
    return {
        "method": "renormalize",
        "num_experts": -(-experts // EXPERT_MULTIPLE) * EXPERT_MULTIPLE,
        "intermediate_size": limits.intermediate_size,
    }


def _says_something(variant: Row, model: Model) -> bool:
    """Whether every feature that the variant switches on is one that the model has.

    The model's own routing, activation and sizes take the place of the variant's, so a variant that is about a
    feature the model lacks would run without what it is about.
    """
    has = _model_fields(model)
    wanted = {name for name, off in NEUTRAL.items() if variant.get(name, off) != off}
    return all(has[name] != NEUTRAL[name] for name in wanted)


def _model_fields(model: Model) -> Row:
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
