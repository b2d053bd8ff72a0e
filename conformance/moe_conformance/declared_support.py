"""Whether a declaration covers a case. What it does not is reported with the reason, never as a pass."""

from __future__ import annotations

from typing import Any

from moe_conformance.cases.case import LayerCase, Shape, TailCase
from moe_contract import ConsumerDeclaration, ProducerDeclaration, QuantFormat
from moe_contract.limits import Request, beyond
from moe_contract.quant import NVFP4_BLOCK


def tail_unsupported(declared: ConsumerDeclaration, case: TailCase, device: str) -> str | None:
    """Why this consumer does not claim this case; None when it does."""
    asked = _request(case, device, weights_dtype=case.weights_dtype, ranks=case.ranks)
    forms = {
        f"norm weight in {case.norm_weight_dtype}": case.norm_weight_dtype in declared.norm_weight_dtypes,
        "weight_bias": case.weight_bias == 0.0 or declared.weight_bias,
        f"quantised output {case.quant}": case.quant is None or case.quant in declared.quant_formats,
        "a finalized tensor as input": case.form != "finalized" or declared.accepts_finalized,
        "route-major rows": not case.route_major or declared.route_major,
        f"NVFP4 with H {case.hidden_size}, which is not a multiple of {NVFP4_BLOCK}": (
            case.quant is not QuantFormat.NVFP4 or case.hidden_size % NVFP4_BLOCK == 0
        ),
    }
    return _first_missing(declared, asked, forms)


def layer_unsupported(declared: ProducerDeclaration, case: LayerCase, device: str) -> str | None:
    """Why this producer does not claim this case; None when it does."""
    asked = _request(
        case,
        device,
        method=case.method,
        num_experts=case.num_experts,
        activation=case.activation,
        expert_biases=case.biases,
        expert_parallel=case.ep != 1,
    )
    return _first_missing(declared, asked, {})


def layer_unshardable(case: LayerCase) -> str | None:
    """Why this layer has no equal part for each of its ranks, as with ``--tp 3``; None when it has."""
    if case.ranks % case.ep:
        return f"{case.ranks} ranks cannot be split into {case.ep} expert-parallel groups"
    sizes = {
        f"intermediate size {case.intermediate_size}": (case.intermediate_size, case.ranks // case.ep, "tensor"),
        f"shared intermediate size {case.shared_intermediate_size}": (
            case.shared_intermediate_size, case.ranks, "tensor"
        ),
        f"{case.num_experts} experts": (case.num_experts, case.ep, "expert"),
    }  # fmt: skip
    for what, (size, ranks, kind) in sizes.items():
        if size % ranks:
            return f"this profile's layer cannot be split: {what} over {ranks} {kind}-parallel ranks"
    return None


def _request(case: Shape, device: str, **fields: Any) -> Request:
    """What every case asks, and ``fields``."""
    return Request(
        device=device,
        dtype=case.dtype,
        top_k=case.top_k,
        hidden_size=case.hidden_size,
        tokens=case.tokens,
        **fields,
    )


def _first_missing(
    declared: ConsumerDeclaration | ProducerDeclaration, asked: Request, forms: dict[str, bool]
) -> str | None:
    """The first declared limit that is exceeded, else the first form of a call that is not covered."""
    for limit in beyond(declared, asked):
        return f"{declared.name} declares no support: {limit.reason}"
    for form, covered in forms.items():
        if not covered:
            return f"{declared.name} declares no support for {form}"
    return None
