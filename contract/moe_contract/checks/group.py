"""What can only be seen over all ranks of an expert-parallel group (MAP-5)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_contract.checks.findings import MAP, Findings, attribute, routed_of, shape_text
from moe_contract.violations import Violation


def check_expert_parallel_group(outputs: Sequence[object]) -> list[Violation]:
    """Whether every (token, slot) is valid on exactly one rank. ``outputs`` are those of the ranks, in rank order.

    Ranks that hold the same experts (tensor parallel) are not given: one of them stands for all. A finalized output
    has no map: where any rank's is finalized, so must all be, and then there is nothing to compare.
    """
    found = Findings()
    maps: list[Tensor] = []
    finalized = [isinstance(routed_of(output), Tensor) for output in outputs]
    if all(finalized):
        return []
    for rank, output in enumerate(outputs):
        mapped = attribute(routed_of(output), MAP)
        if not isinstance(mapped, Tensor) or mapped.is_meta:
            found.rank = rank
            got = "a finalized tensor" if finalized[rank] else f"no map on {type(output).__name__}"
            found.add("DEFER-1" if finalized[rank] else "OUT-1", "routed", got, "unfinalized, as on the other ranks")
        else:
            maps.append(mapped)
    if found.violations:
        return found.violations
    for rank, mapped in enumerate(maps):
        if mapped.shape != maps[0].shape or mapped.dim() != 2:
            found.rank = rank
            expected = f"[T, K], shape {shape_text(maps[0])} as on rank 0"
            found.add("MAP-1", MAP, f"shape {shape_text(mapped)}", expected)
    if not found.violations:
        _check_owners(torch.stack([mapped.to(maps[0].device) >= 0 for mapped in maps]), found)
    return found.violations


def _check_owners(owned: Tensor, found: Findings) -> None:
    """``owned [N, T, K]``: whether the rank has the route."""
    off = owned.sum(0) != 1
    places = off.nonzero()
    if not len(places):
        return
    token, slot = places[0].tolist()
    ranks = owned[:, token, slot].nonzero().flatten().tolist()
    got = f"valid on ranks {', '.join(map(str, ranks))}" if ranks else "valid on no rank"
    hint = "counted more than once in the sum" if ranks else "its expert is missing from the sum"
    expected = f"valid on exactly one of {owned.shape[0]} ranks"
    found.add_at("MAP-5", MAP, got, expected, token=token, slot=slot, count=len(places), hint=hint)
