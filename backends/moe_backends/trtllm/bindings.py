"""The keywords that the adapters pass to each entry point, by version.

Always by keyword: parameters were inserted in the middle more than once, so that a position means another thing from
one version to the next. A value that a version has no parameter for is left out where it says nothing, and refused
where it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from moe_contract import Activation, UnsupportedError

from .returns import Entry
from .signatures import Recorded
from .versions import Version

ACTIVATIONS = {Activation.SILU: 3, Activation.SWIGLU_OAI: 3, Activation.RELU2: 6}
"""``ActivationType`` by activation: the numbers of Swiglu and Relu2 are the same in every version."""
SWIGLU = 3
BLOCK_MAJOR_K = 2
"""``WeightLayout.BlockMajorK``, the only one that the bfloat16 entry points take."""
_ROUTING = {"routing_logits", "routing_bias"}
_SIZES = {"num_experts", "top_k", "n_group", "topk_group", "intermediate_size"}
_EXPERTS = {"local_expert_offset", "local_num_experts"}
_COMMON = _SIZES | _EXPERTS | {"routed_scaling_factor", "routing_method_type", "do_finalize", "tune_max_num_tokens"}
_BF16 = {"hidden_states", "gemm1_weights", "gemm2_weights", "use_shuffled_weight", "weight_layout"}
_FP4_WEIGHTS = {"gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale"}
_FP4_ABSENT = {"gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias"}
_FP4_SCALES = {"output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"}
_FP4 = {"hidden_states", "hidden_states_scale", "activation_type"} | _FP4_WEIGHTS | _FP4_ABSENT | _FP4_SCALES
ALWAYS: dict[Entry, frozenset[str]] = {
    Entry.BF16: frozenset(_ROUTING | _COMMON | _BF16),
    Entry.BF16_ROUTED: frozenset({"topk_ids"} | _COMMON | _BF16),
    Entry.FP4: frozenset(_ROUTING | _COMMON | _FP4),
    Entry.FP4_ROUTED: frozenset({"topk_ids", "routing_bias"} | _COMMON | _FP4),
}
"""Keywords that every version has."""


class Feature(StrEnum):
    """What a call may ask for that some versions lack; the value is the keyword that carries it."""

    ACTIVATION = "activation_type"
    NORM = "norm_topk_prob"
    REPLAY = "routing_replay_out"
    ALPHA = "gemm1_alpha"
    BETA = "gemm1_beta"
    CLAMP = "gemm1_clamp_limit"


_GATE = {Feature.ALPHA: Version(0, 6, 13), Feature.BETA: Version(0, 6, 13), Feature.CLAMP: Version(0, 6, 13)}
_SINCE: dict[Entry, dict[Feature, Version]] = {
    Entry.BF16: {
        Feature.ACTIVATION: Version(0, 6, 8),
        Feature.NORM: Version(0, 6, 8),
        Feature.REPLAY: Version(0, 6, 8),
        **_GATE,
    },
    Entry.BF16_ROUTED: {Feature.ACTIVATION: Version(0, 6, 8), Feature.REPLAY: Version(0, 6, 8), **_GATE},
    Entry.FP4: {Feature.NORM: Version(0, 6, 8), Feature.REPLAY: Version(0, 6, 8)},
    Entry.FP4_ROUTED: {},
}
NEUTRAL: Mapping[Feature, object] = {Feature.ACTIVATION: SWIGLU, Feature.NORM: True}
"""What a version without the parameter does anyway; None for the others."""
SEPARATE_SINCE = {Entry.BF16_ROUTED: Version(0, 6, 18), Entry.FP4_ROUTED: Version(0, 6, 12)}
"""First version whose routed entry takes ids and weights as a pair instead of packed."""


def has(entry: Entry, feature: Feature, version: Version) -> bool:
    """Whether this version's entry point has the parameter."""
    if feature.value in ALWAYS[entry]:
        return True
    since = _SINCE[entry].get(feature)
    return since is not None and version >= since


def keywords(entry: Entry, version: Version) -> frozenset[str]:
    """Every keyword that the adapters may pass to this entry point in this version."""
    return ALWAYS[entry] | {feature.value for feature in Feature if has(entry, feature, version)}


def bound(entry: Entry, version: Version, arguments: Mapping[str, object]) -> dict[str, object]:
    """The arguments without those that this version lacks and that say nothing.

    Raises:
        UnsupportedError: an argument that this version has no parameter for, and that changes the result.
    """
    known = keywords(entry, version)
    for name in arguments.keys() - known:
        neutral = NEUTRAL.get(Feature(name)) if name in set(Feature) else None
        if arguments[name] is not None and arguments[name] != neutral:
            raise UnsupportedError(f"CAP-1: flashinfer {version} {entry.value} has no parameter {name}", clause="CAP-1")
    return {name: value for name, value in arguments.items() if name in known}


def problems(version: Version, signatures: Recorded) -> list[str]:
    """One line for each call of the adapters that would not bind to these signatures."""
    wrong = []
    for entry in Entry:
        if entry.value not in signatures:
            wrong.append(f"{entry.value} does not exist")
            continue
        names = {parameter[0] for parameter in signatures[entry.value]}
        required = {parameter[0] for parameter in signatures[entry.value] if len(parameter) < 2 or not parameter[1]}
        passed = keywords(entry, version)
        wrong += [f"{entry.value} has no parameter {name}" for name in sorted(passed - names)]
        wrong += [f"{entry.value} also requires {name}" for name in sorted(required - passed)]
    return wrong
