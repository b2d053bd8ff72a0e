"""The second tier: what the tensors hold. Vectorised; a correct output costs one transfer of a few flags to the host.

Only fields that the metadata tier found whole are read. Non-finite values in referenced *rows* are no violation: they
are a result that has to propagate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from moe_contract.checks.findings import MAP, ROWS, TRIPLE, WEIGHTS, Findings, attribute, routed_of
from moe_contract.checks.weights import weight_probes

Probe = tuple[Tensor, Callable[[Findings], None]]
"""A flag on the device that says whether something is broken, and what reports it if so."""


def check_values(output: object, found: Findings) -> None:
    """Adds what the values of ``output`` break (MAP-1 to MAP-3, WGT-3) to ``found``, the metadata tier's findings."""
    routed = routed_of(output)
    broken = found.broken()
    if isinstance(routed, Tensor) or "routed" in broken:
        return
    rows, weights, mapped = (attribute(routed, field) for field in TRIPLE)
    if not isinstance(mapped, Tensor) or MAP in broken:
        return
    if mapped.is_meta:
        found.add("OUT-3", MAP, "a meta tensor, which holds no values", "a tensor with data")
        return
    num_rows = rows.shape[0] if isinstance(rows, Tensor) and ROWS not in broken else None
    route_major = attribute(routed, "route_major") is True and "route_major" not in broken
    before = len(found.violations)
    _run(_map_probes(mapped, num_rows), found)
    probes: list[Probe] = []
    # A stray or doubled entry already explains a map that is not the identity.
    if route_major and len(found.violations) == before:
        probes.append(_identity_probe(mapped))
    if isinstance(weights, Tensor) and WEIGHTS not in broken and weights.device == mapped.device:
        probes.extend(weight_probes(weights, mapped >= 0))
    _run(probes, found)


def _run(probes: Iterable[Probe], found: Findings) -> None:
    """One transfer for all flags; then only what is broken reports."""
    probes = list(probes)
    if not probes:
        return
    flags = torch.stack([flag for flag, _ in probes]).tolist()
    for raised, (_, report) in zip(flags, probes, strict=True):
        if raised:
            report(found)


def _map_probes(mapped: Tensor, num_rows: int | None) -> list[Probe]:
    stray = mapped < -1
    if num_rows is not None:
        stray = stray | (mapped >= num_rows)
    flat = torch.where(stray, -1, mapped).flatten()
    ordered, origin = torch.sort(flat, stable=True)  # stable: of equal rows, the later route comes second
    doubled = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    top_k = mapped.shape[1]
    return [
        (stray.any(), lambda found: _report_stray(mapped, stray, num_rows, found)),
        (doubled.any(), lambda found: _report_doubled(ordered, origin, doubled, top_k, found)),
    ]


def _report_stray(mapped: Tensor, stray: Tensor, num_rows: int | None, found: Findings) -> None:
    """Names the first entry, in token order, that is neither -1 nor a row."""
    places = stray.nonzero()
    token, slot = places[0].tolist()
    value = int(mapped[token, slot])
    bound = "P" if num_rows is None else str(num_rows)
    found.add_at("MAP-2", MAP, str(value), f"-1 or a row in [0, {bound})", token=token, slot=slot, value=value,
                 count=len(places))  # fmt: skip


def _report_doubled(ordered: Tensor, origin: Tensor, doubled: Tensor, top_k: int, found: Findings) -> None:
    """Names the first route, in token order, whose row an earlier route already has."""
    places = doubled.nonzero().flatten()
    at = int(places[origin[1:][places].argmin()])
    row = int(ordered[at + 1])
    first = divmod(int(origin[at]), top_k)
    token, slot = divmod(int(origin[at + 1]), top_k)
    got = f"row {row}, which token {first[0]}, slot {first[1]} has too"
    found.add_at("MAP-3", MAP, got, "a row of its own", token=token, slot=slot, value=row, count=len(places),
                 hint="one of the two routes' results was overwritten")  # fmt: skip


def _identity_probe(mapped: Tensor) -> Probe:
    """For route-major rows, whose map is the identity but for -1."""
    identity = torch.arange(mapped.numel(), dtype=mapped.dtype, device=mapped.device).view(mapped.shape)
    off = (mapped != identity) & (mapped >= 0)
    return off.any(), lambda found: _report_not_identity(mapped, off, found)


def _report_not_identity(mapped: Tensor, off: Tensor, found: Findings) -> None:
    """Names the first entry that is neither -1 nor its own route's number."""
    places = off.nonzero()
    token, slot = places[0].tolist()
    value, expected = int(mapped[token, slot]), token * mapped.shape[1] + slot
    found.add_at("MAP-1", MAP, str(value), f"-1 or {expected} = t * K + k, since route_major is True", token=token,
                 slot=slot, value=value, count=len(places))  # fmt: skip
