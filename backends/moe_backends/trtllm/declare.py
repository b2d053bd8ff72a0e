"""What the TRTLLM producers say of themselves, by FlashInfer version."""

from __future__ import annotations

from moe_contract import Activation, ProducerDeclaration, RoutingMethod
from moe_contract.declarations import INPUT_WEIGHTED_METHODS

from . import routing
from .bindings import Feature, has
from .returns import Entry
from .versions import NEWEST, OLDEST, Version
from .weights import bf16, nvfp4

MAX_EXPERTS, MAX_TOP_K = 2048, 32
"""The largest compiled routing kernel (Renormalize)."""
OUTSIDE = INPUT_WEIGHTED_METHODS | {RoutingMethod.PRECOMPUTED}
"""Routed before the call: Llama 4 because its weight goes into the input, which these kernels do not do."""


def declare_bf16(version: Version, *, emulated: bool, router_outside: bool = False) -> ProducerDeclaration:
    """``trtllm_bf16_moe`` of a FlashInfer version. The intermediate is rounded to bfloat16.

    ``router_outside``: ids and float32 weights come from outside and are handed on as they are.
    """
    activations = {Activation.SILU}
    if has(Entry.BF16, Feature.ACTIVATION, version):
        activations.add(Activation.RELU2)
    if has(Entry.BF16, Feature.ALPHA, version):
        activations.add(Activation.SWIGLU_OAI)
    differences: dict[str, object] = {}
    if router_outside:
        differences = {"routing_methods": {RoutingMethod.PRECOMPUTED}, "weights_dtypes": {"float32"}, "folds_scale": ()}
    return _declare(
        "trtllm-bf16-modular" if router_outside else "trtllm-bf16",
        version,
        emulated,
        {
            "activations": activations,
            "deferral_multiple": bf16.HIDDEN_MULTIPLE,
            "intermediate_dtype": "bfloat16",
            "routing_methods": routing.methods(version) | OUTSIDE,
        }
        | differences,
    )


def declare_nvfp4(version: Version, *, emulated: bool) -> ProducerDeclaration:
    """``trtllm_fp4_block_scale_moe`` of a FlashInfer version, NVFP4 in both operands.

    Not Llama 4: its weighted input would be quantised from a rounding that the contract leaves open.
    """
    return _declare(
        "trtllm-nvfp4",
        version,
        emulated,
        {
            "activations": {Activation.SILU, Activation.RELU2},
            "deferral_multiple": nvfp4.HIDDEN_MULTIPLE,
            "hidden_size_multiple": 16,
            "quantization": "nvfp4",
            "routing_methods": routing.methods(version) | {RoutingMethod.PRECOMPUTED},
        },
    )


def _declare(name: str, version: Version, emulated: bool, differences: dict[str, object]) -> ProducerDeclaration:
    fields: dict[str, object] = {
        "name": f"{name}@emulated" if emulated else name,
        "version": str(version),
        "emulated": emulated,
        "devices": {"cpu", "cuda"} if emulated else {"cuda"},
        "dtypes": {"bfloat16"},
        "folds_scale": routing.folding_methods(version),
        "never_deferred": INPUT_WEIGHTED_METHODS,
        "routing_limits": routing.limits(version),
        "max_experts": MAX_EXPERTS,
        "max_top_k": MAX_TOP_K,
        "expert_biases": False,
        "graph_capturable": not emulated,
        "requires": "" if emulated else f"a GPU of compute capability 10.x and flashinfer-python {OLDEST} to {NEWEST}",
    }
    return ProducerDeclaration.model_validate(fields | differences)
