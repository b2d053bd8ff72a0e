"""How the contract's routing methods are asked for, and which of them fold the scale, by version.

Read from each wheel's ``RoutingMethodType`` and routing runner: the numbers are stable, what grows is how many exist.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from moe_contract import PrecomputedRouting, Routing, RoutingMethod, UnsupportedError
from moe_contract.declarations import RoutingLimit

from .versions import OLDEST, Version


class Method(NamedTuple):
    """One routing method of the kernels: its number, since when, its compiled sizes and its folding."""

    number: int
    since: Version
    max_experts: int
    max_top_k: int
    folds_since: Version | None = None
    """First version that multiplies the weights by the routed scaling factor; None: it is silently dropped."""


METHODS: dict[RoutingMethod, Method] = {
    RoutingMethod.DEFAULT: Method(0, OLDEST, 256, 8),
    RoutingMethod.RENORMALIZE: Method(1, OLDEST, 2048, 32),
    RoutingMethod.DEEPSEEK_V3: Method(2, OLDEST, 1024, 32, folds_since=OLDEST),
    RoutingMethod.RENORMALIZE_NAIVE: Method(4, OLDEST, 2048, 32),
    RoutingMethod.TOPK: Method(5, OLDEST, 256, 8),
    RoutingMethod.SIGMOID_RENORM: Method(6, Version(0, 6, 8), 256, 8),
    # flashinfer#3499: a factor of 1.0 was hard-coded until 0.6.13.
    RoutingMethod.MINIMAX2: Method(7, Version(0, 6, 8), 1024, 32, folds_since=Version(0, 6, 13)),
    RoutingMethod.SIGMOID: Method(8, Version(0, 6, 11), 256, 8),
    RoutingMethod.TOPK_SIGMOID: Method(9, Version(0, 6, 18), 256, 8),
}
"""LLAMA4 is not asked for by number: its bfloat16 and NVFP4 kernels weight the expert's output, the contract its input.
Sizes are those of the compiled kernels; before flashinfer#3840 a larger one went on with garbage."""
GROUP_EXPERTS = 32
"""Most experts in one group of grouped DeepSeek-V3 routing: one warp ranks a group."""
GROUPS_KEPT = 4
"""Most groups that it keeps."""
GROUPED_EXPERTS = 512
"""Most experts with groups."""
GROUPED_TOP_K = 8
"""Most slots with groups, up to WIDE_FROM experts; WIDE_TOP_K above."""
WIDE_FROM, WIDE_TOP_K = 384, 22


def methods(version: Version) -> frozenset[RoutingMethod]:
    """The methods that the kernels of this version route by logits."""
    return frozenset(method for method, known in METHODS.items() if version >= known.since)


def folding_methods(version: Version) -> frozenset[RoutingMethod]:
    """The methods whose weights already contain the scale in this version (SCALE-3)."""
    return frozenset(
        method
        for method, known in METHODS.items()
        if version >= known.since and known.folds_since is not None and version >= known.folds_since
    )


def limits(version: Version) -> tuple[RoutingLimit, ...]:
    """The compiled sizes of each method, for a declaration."""
    return tuple(
        RoutingLimit(method=method, max_experts=METHODS[method].max_experts, max_top_k=METHODS[method].max_top_k)
        for method in RoutingMethod
        if method in methods(version)
    )


def require_groups(routing: Routing, num_experts: int) -> None:
    """UnsupportedError where grouped DeepSeek-V3 routing has no kernel for these sizes."""
    groups = routing.num_groups
    if routing.method is not RoutingMethod.DEEPSEEK_V3 or groups <= 1:
        return
    most = WIDE_TOP_K if num_experts > WIDE_FROM else GROUPED_TOP_K
    wrong = {
        f"a multiple of 4 experts, got {num_experts}": num_experts % 4 == 0,
        f"groups of at most {GROUP_EXPERTS} experts, got {num_experts} in {groups}": (
            num_experts <= GROUP_EXPERTS * groups
        ),
        f"at most {GROUPED_EXPERTS} experts, got {num_experts}": num_experts <= GROUPED_EXPERTS,
        f"at most {GROUPS_KEPT} groups kept, got {routing.topk_groups}": routing.topk_groups <= GROUPS_KEPT,
        f"top_k of at most {most}, got {routing.top_k}": routing.top_k <= most,
    }
    if missing := next((what for what, holds in wrong.items() if not holds), ""):
        raise UnsupportedError(f"CAP-1: grouped DeepSeek-V3 routing takes {missing}", clause="CAP-1")


def logits_arguments(routing: Routing, num_experts: int, device: torch.device) -> dict[str, object]:
    """The routing arguments of a call with logits; the scale is passed to every method, and dropped by most."""
    grouped = routing.method is RoutingMethod.DEEPSEEK_V3 and routing.num_groups > 1
    return {
        "routing_bias": _bias(routing, num_experts, device),
        "n_group": routing.num_groups if grouped else None,
        "topk_group": routing.topk_groups if grouped else None,
        "routed_scaling_factor": routing.routed_scaling_factor,
        "routing_method_type": METHODS[routing.method].number,
    }


def precomputed_arguments() -> dict[str, object]:
    """The routing arguments of a call with ids and weights, which are used verbatim: no scale, no bias."""
    return {
        "n_group": None,
        "topk_group": None,
        "routed_scaling_factor": None,
        # Only decides how many slots the kernels are compiled for; RENORMALIZE has the most.
        "routing_method_type": METHODS[RoutingMethod.RENORMALIZE].number,
    }


def _bias(routing: Routing, num_experts: int, device: torch.device) -> Tensor | None:
    """A method that takes a bias needs one; without it the selection is by the sigmoid alone, so zeros."""
    if not routing.method.takes_bias:
        return None
    if routing.bias is None:
        return torch.zeros(num_experts, dtype=torch.float32, device=device)
    return routing.bias.to(device=device, dtype=torch.float32)


def pack(given: PrecomputedRouting) -> Tensor:
    """``[T, K]`` int32: the id in the high 16 bits, the weight rounded to bfloat16 in the low ones.

    A slot without an expert (a negative id) stays negative, which the kernels skip.
    """
    bits = given.weights.to(torch.bfloat16).contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    return (given.ids.to(torch.int32) << 16) | bits


def unpack(packed: Tensor) -> PrecomputedRouting:
    """The inverse of ``pack``: int32 ids and bfloat16 weights."""
    low = packed & 0xFFFF
    signed = torch.where(low >= 2**15, low - 2**16, low).to(torch.int16)
    return PrecomputedRouting(packed >> 16, signed.view(torch.bfloat16))
