"""Which of its declared limits a backend is asked to exceed; what it then refuses with (CAP-1, CAP-2)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from moe_contract.backend import RankGroup, TailCapacity
from moe_contract.declarations import ConsumerDeclaration, ProducerDeclaration
from moe_contract.dtypes import dtype_name
from moe_contract.layer import MoELayer


def capacity_beyond(declaration: ConsumerDeclaration, group: RankGroup, capacity: TailCapacity) -> Iterator[str]:
    """Every declared limit of a consumer that a group and a capacity exceed, in words."""
    sizes = declaration.world_sizes
    if sizes is not None and group.size not in sizes:
        yield f"CAP-1: {group.size} ranks are not among its world_sizes ({', '.join(map(str, sorted(sizes)))})"
    if group.device.type not in declaration.devices:
        yield f"CAP-2: {group.device.type} is not among its devices ({_names(declaration.devices)})"
    if (dtype := dtype_name(capacity.dtype)) not in declaration.dtypes:
        yield f"CAP-1: {dtype} is not among its dtypes ({_names(declaration.dtypes)})"
    sizes_asked = {
        "max_tokens": capacity.max_tokens,
        "max_top_k": capacity.top_k,
        "max_hidden_size": capacity.hidden_size,
    }
    yield from _sizes_beyond(declaration, sizes_asked)


def layer_beyond(declaration: ProducerDeclaration, layer: MoELayer) -> Iterator[str]:
    """Every declared limit of a producer that a layer exceeds, in words."""
    chosen = {
        "dtypes": dtype_name(layer.dtype),
        "devices": layer.device.type,
        "routing_methods": layer.routing.method,
        "activations": layer.activation,
    }
    for field, value in chosen.items():
        if value not in (supported := getattr(declaration, field)):
            clause = "CAP-2" if field == "devices" else "CAP-1"
            yield f"{clause}: {value} is not among its {field} ({_names(supported)})"
    limits = {
        "max_top_k": layer.routing.top_k,
        "max_hidden_size": layer.hidden_size,
        "max_experts": layer.num_experts,
    }
    yield from _sizes_beyond(declaration, limits)
    if reason := declaration.routing_beyond(layer.routing.method, layer.num_experts, layer.routing.top_k):
        yield f"CAP-1: no support for {reason}"
    weights = layer.experts
    if not declaration.expert_biases and any(
        b is not None for b in (weights.up_bias, weights.gate_bias, weights.down_bias)
    ):
        yield "CAP-1: expert biases are declared unsupported, but the layer has some"
    if not declaration.expert_parallel and layer.num_local_experts != layer.num_experts:
        yield "CAP-1: expert parallelism is declared unsupported, but the layer is a part of the experts"


def _sizes_beyond(declaration: ConsumerDeclaration | ProducerDeclaration, asked: dict[str, int]) -> Iterator[str]:
    for field, size in asked.items():
        if (limit := getattr(declaration, field)) is not None and size > limit:
            yield f"CAP-1: {field} is {limit}, got {size}"
    hidden_size, multiple = asked["max_hidden_size"], declaration.hidden_size_multiple
    if hidden_size % multiple:
        yield f"CAP-1: hidden size must be a multiple of {multiple}, got {hidden_size}"


def _names(values: AbstractSet[str]) -> str:
    return ", ".join(sorted(values))
