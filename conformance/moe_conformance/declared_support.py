"""Whether a declaration covers a case. What it does not is reported with the reason, never as a pass."""

from __future__ import annotations

from moe_conformance.cases.case import LayerCase, Shape, TailCase
from moe_contract import ConsumerDeclaration, ProducerDeclaration, QuantFormat
from moe_contract.quant import NVFP4_BLOCK


def tail_unsupported(declared: ConsumerDeclaration, case: TailCase, device: str) -> str | None:
    """Why this consumer does not claim this case; None when it does."""
    worlds = declared.world_sizes
    checks = {
        f"{case.ranks} ranks (declared: {sorted(worlds or ())})": worlds is None or case.ranks in worlds,
        f"{case.weights_dtype} routing weights": case.weights_dtype in declared.weights_dtypes,
        f"norm weight in {case.norm_weight_dtype}": case.norm_weight_dtype in declared.norm_weight_dtypes,
        "weight_bias": case.weight_bias == 0.0 or declared.weight_bias,
        f"quantised output {case.quant}": case.quant is None or case.quant in declared.quant_formats,
        "a finalized tensor as input": case.form != "finalized" or declared.accepts_finalized,
        "route-major rows": not case.route_major or declared.route_major,
        f"NVFP4 with H {case.hidden_size}, which is not a multiple of {NVFP4_BLOCK}": (
            case.quant is not QuantFormat.NVFP4 or case.hidden_size % NVFP4_BLOCK == 0
        ),
    }
    return _first_missing(declared, checks, case, device)


def layer_unsupported(declared: ProducerDeclaration, case: LayerCase, device: str) -> str | None:
    """Why this producer does not claim this case; None when it does."""
    limit = declared.max_experts
    too_large = declared.routing_beyond(case.method, case.num_experts, case.top_k)
    checks = {
        f"routing method {case.method.value}": case.method in declared.routing_methods,
        f"activation {case.activation.value}": case.activation in declared.activations,
        "expert biases": not case.biases or declared.expert_biases,
        "expert parallelism": case.ep == 1 or declared.expert_parallel,
        too_large: not too_large,
        f"{case.num_experts} experts (declared: at most {limit})": limit is None or case.num_experts <= limit,
    }
    return _first_missing(declared, checks, case, device)


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


def _first_missing(
    declared: ConsumerDeclaration | ProducerDeclaration, checks: dict[str, bool], case: Shape, device: str
) -> str | None:
    def within(value: int, limit: int | None) -> bool:
        return limit is None or value <= limit

    common = {
        f"device {device}": device in declared.devices,
        f"activation dtype {case.dtype}": case.dtype in declared.dtypes,
        f"{case.tokens} tokens (declared: at most {declared.max_tokens})": within(case.tokens, declared.max_tokens),
        f"top_k {case.top_k} (declared: at most {declared.max_top_k})": within(case.top_k, declared.max_top_k),
        f"hidden size {case.hidden_size} (declared: at most {declared.max_hidden_size})": within(
            case.hidden_size, declared.max_hidden_size
        ),
        f"hidden size {case.hidden_size} (declared: multiples of {declared.hidden_size_multiple})": (
            case.hidden_size % declared.hidden_size_multiple == 0
        ),
    }
    for what, covered in (common | checks).items():
        if not covered:
            return f"{declared.name} declares no support for {what}"
    return None
