"""Cases at and beyond the limits that a backend declares."""

from __future__ import annotations

from dataclasses import dataclass

from moe_conformance.cases.case import LayerCase, TailCase
from moe_contract import ConsumerDeclaration, ProducerDeclaration, RoutingMethod

LARGEST_CASE = 2**24
"""Elements T * K * H * N up to which a limit is tried; a larger one needs more memory and time than a case may take."""
WORLD_SIZES = (1, 2, 3, 4, 8, 16)
SMALL_HIDDEN, SMALL_INTERMEDIATE = 256, 32
"""Sizes of a layer that is there to be refused: beyond a limit of experts, a real model's would take gigabytes. They
can be split over up to 16 ranks."""


@dataclass(frozen=True)
class Limit:
    """One declared limit: a case at it (None where the limit excludes a kind, not a size) and a case beyond it."""

    name: str
    inside: TailCase | None
    outside: TailCase


def tail_limits(declared: ConsumerDeclaration, case: TailCase) -> list[Limit]:
    """The limits of a consumer that this machine can hold a case of."""
    found = [
        _size("max_tokens", "tokens", declared.max_tokens, case),
        _size("max_top_k", "top_k", declared.max_top_k, case),
    ]
    width = declared.max_hidden_size
    multiple = declared.hidden_size_multiple
    if width is not None:
        within = width // multiple * multiple
        found.append(_limit("max_hidden_size", case, {"hidden_size": within}, {"hidden_size": within + multiple}))
    if multiple > 1:
        hidden = -(-case.hidden_size // multiple) * multiple
        found.append(_limit("hidden_size_multiple", case, {"hidden_size": hidden}, {"hidden_size": hidden + 1}))
    worlds = declared.world_sizes
    if worlds is not None:
        other = next((size for size in WORLD_SIZES if size not in worlds), None)
        if other is not None:
            found.append(Limit("world_sizes", None, case.model_copy(update={"ranks": other})))
    for dtype in ("bfloat16", "float16"):
        if dtype not in declared.dtypes:
            found.append(Limit("dtypes", None, case.model_copy(update={"dtype": dtype})))
    return [limit for limit in found if limit is not None and _affordable(limit.outside)]


def producer_limits(declared: ProducerDeclaration, case: LayerCase) -> list[tuple[str, LayerCase]]:
    """Cases beyond a producer's limits, each with the limit's name."""
    small = _small(declared, case)
    changes: list[tuple[str, dict[str, object]]] = []
    for name, field, limit in (
        ("max_tokens", "tokens", declared.max_tokens),
        ("max_hidden_size", "hidden_size", declared.max_hidden_size),
        ("max_experts", "num_experts", declared.max_experts),
    ):
        if limit is not None:
            changes.append((name, {field: limit + 1}))
    if declared.max_top_k is not None:
        beyond = declared.max_top_k + 1
        changes.append(("max_top_k", {"top_k": beyond, "num_experts": max(case.num_experts, 2 * beyond)}))
    if declared.hidden_size_multiple > 1:
        changes.append(("hidden_size_multiple", {"hidden_size": small.hidden_size + 1}))
    missing = [method for method in RoutingMethod if method not in declared.routing_methods]
    changes += [("routing_methods", {"method": method}) for method in missing[:1]]
    changes += [("dtypes", {"dtype": d}) for d in ("bfloat16", "float16") if d not in declared.dtypes]
    cases = [(name, small.model_copy(update=update)) for name, update in changes]
    return [(name, other) for name, other in cases if _affordable(other)]


def _small(declared: ProducerDeclaration, case: LayerCase) -> LayerCase:
    """The case without what a refusal does not depend on: large matrices, and groups that divide its experts."""
    multiple = declared.hidden_size_multiple
    sizes = {
        "hidden_size": -(-SMALL_HIDDEN // multiple) * multiple,
        "intermediate_size": SMALL_INTERMEDIATE,
        "shared_intermediate_size": SMALL_INTERMEDIATE,
    }
    smaller = {name: min(size, getattr(case, name)) for name, size in sizes.items()}
    return case.model_copy(update={**smaller, "num_groups": 1, "topk_groups": 1})


def _size(name: str, field: str, limit: int | None, case: TailCase) -> Limit | None:
    return None if limit is None else _limit(name, case, {field: limit}, {field: limit + 1})


def _limit(name: str, case: TailCase, inside: dict[str, int], outside: dict[str, int]) -> Limit:
    return Limit(name, case.model_copy(update=inside), case.model_copy(update=outside))


def _affordable(case: TailCase | LayerCase) -> bool:
    return case.tokens * case.top_k * case.hidden_size * case.ranks <= LARGEST_CASE
