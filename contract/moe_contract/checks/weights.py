"""WGT-3: do the weights' bytes look like what their dtype says? A breach has a pattern long before a result shows it.

These are plausibility checks: they recognise bytes that no router writes. That weights are the *right* ones only a
comparison with the layer can tell.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_contract.checks.findings import WEIGHTS, Findings
from moe_contract.dtypes import dtype_name

Probe = tuple[Tensor, Callable[[Findings], None]]

LARGEST_WEIGHT = 2.0**16
"""Routing weights are probabilities, sigmoids or raw logits, times a factor of a few units; engines store them in
float16 too, whose range ends just below this. Random bits read as bfloat16 pass it nearly every second time."""
PAIR_RANGE = (2.0**-12, 2.0**4)
"""Where the 16-bit weights of a pair are looked for: 1/30 of all 16-bit patterns."""
MIN_PAIRS = 6
"""Pairs needed before a pattern in them counts: (1/30)^6 is a false alarm in 10^9 outputs of random float32 weights."""


def weight_probes(weights: Tensor, valid: Tensor) -> list[Probe]:
    """The probes for ``weights [T, K]``, of which only ``valid`` slots are used."""
    wide = weights.float()
    magnitude = wide.abs()
    smallest = torch.finfo(weights.dtype).smallest_normal
    implausible = valid & ~(magnitude < LARGEST_WEIGHT)  # the negation catches NaN as well
    used = valid & (magnitude > 0)
    only_subnormal = used.any() & ~(used & (magnitude >= smallest)).any() & (weights.dtype != torch.float16)
    probes: list[Probe] = [
        (implausible.any(), lambda found: _report(weights, implausible, _why_implausible(weights), found)),
        (only_subnormal, lambda found: _report(weights, used, _HALF_FILLED, found)),
    ]
    if weights.dtype == torch.float32:
        pairs = _holds_pairs(weights)
        probes.append((pairs & ~implausible.any(), lambda found: _report(weights, valid, _PAIRS, found)))
    else:
        zeros = _alternates_with_zero(weights)
        probes.append((zeros & ~implausible.any(), lambda found: _report(weights, valid, _WIDE, found)))
    return probes


_PAIRS = (
    "the bytes look like pairs of bfloat16 weights read as float32: the kernel writes 16-bit weights into a buffer "
    "labelled float32"
)
_HALF_FILLED = (
    "no weight that is used is a normal number: the bytes look like a 16-bit weight in the low half of a wider element"
)
_WIDE = "the bytes look like float32 weights read in 16 bits: every other element is their low half"


def _report(weights: Tensor, places: Tensor, hint: str, found: Findings) -> None:
    where = places.nonzero()
    if not len(where):  # a pattern of the whole buffer, none of whose slots is used on this rank
        return
    token, slot = where[0].tolist()
    value = float(weights[token, slot])
    expected = f"a routing weight in {dtype_name(weights.dtype)}"
    finite = value if abs(value) < float("inf") else None
    found.add_at("WGT-3", WEIGHTS, f"{value:.6g}", expected, token=token, slot=slot, value=finite, count=len(where),
                 hint=hint)  # fmt: skip


def _why_implausible(weights: Tensor) -> str:
    """Reads the bytes with the other width, to say what they look like."""
    flat = weights.flatten()
    if weights.dtype == torch.float32:
        return _PAIRS if bool(_in_range(flat.clone().view(torch.bfloat16)).all()) else "stale or unwritten memory?"
    even = flat[: flat.numel() // 2 * 2].clone()
    if even.numel() and bool(_in_range(even.view(torch.float32)).all()):
        return _WIDE
    return "stale or unwritten memory?"


def _in_range(values: Tensor) -> Tensor:
    low, high = PAIR_RANGE
    return (values >= low) & (values <= high)


def _holds_pairs(weights: Tensor) -> Tensor:
    """Whether the first half of a float32 buffer holds 16-bit weights, and the second half, never written, does not."""
    never = torch.zeros((), dtype=torch.bool, device=weights.device)
    flat = weights.flatten()
    filled = flat.numel() // 2
    if filled < MIN_PAIRS:
        return never
    low_halves = _in_range(flat.clone().view(torch.bfloat16)[::2])
    return low_halves[:filled].all() & ~low_halves[filled:].all()


def _alternates_with_zero(weights: Tensor) -> Tensor:
    """Whether every even element is 0 and no odd one is: float32 weights that 16 bits represent, read in 16 bits."""
    flat = weights.flatten()
    if flat.numel() // 2 < MIN_PAIRS:
        return torch.zeros((), dtype=torch.bool, device=weights.device)
    return (flat[::2] == 0).all() & (flat[1::2] != 0).all()
