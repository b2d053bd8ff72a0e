"""Which declared limits of a backend a request exceeds: one rule and one wording for all who ask (CAP-1, CAP-2)."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from moe_contract.backend import RankGroup, TailCapacity, UnsupportedError
from moe_contract.declarations import ConsumerDeclaration, ProducerDeclaration
from moe_contract.dtypes import dtype_name
from moe_contract.layer import Activation, MoELayer, RoutingMethod


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of a backend, as far as declarations limit it.

    None is not asked. Nor is a field that only the other side's declaration limits, so that one request can be put to
    a producer and a consumer.
    """

    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    """The activation dtype's name."""
    top_k: int
    hidden_size: int
    tokens: int | None = None
    weights_dtype: str | None = None
    """``activation``, ``float32``, or the name of a dtype that is neither."""
    ranks: int | None = None
    """Consumer: those that it reduces over."""
    method: RoutingMethod | None = None
    num_experts: int | None = None
    """Of the whole layer."""
    activation: Activation | None = None
    expert_biases: bool = False
    expert_parallel: bool = False


@dataclass(frozen=True)
class Beyond:
    """One declared limit, or the capacity, that a request exceeds."""

    clause: str
    """By which it is refused: of a limit CAP-2 where the machine is it, else CAP-1."""
    reason: str
    """What is declared and what was asked, in words."""

    def __str__(self) -> str:
        return f"{self.clause}: {self.reason}"


def beyond(declaration: ConsumerDeclaration | ProducerDeclaration, asked: Request) -> Iterator[Beyond]:
    """Every declared limit that the request exceeds."""
    sizes: frozenset[int] | None = getattr(declaration, "world_sizes", None)
    if sizes is not None and asked.ranks is not None and asked.ranks not in sizes:
        yield Beyond("CAP-1", f"{asked.ranks} ranks are not among its world_sizes ({_listed(sizes)})")
    if asked.device not in declaration.devices:
        yield Beyond("CAP-2", f"{asked.device} is not among its devices ({_listed(declaration.devices)})")
    reasons = [*_choices_beyond(declaration, asked), *_sizes_beyond(declaration, asked)]
    if isinstance(declaration, ProducerDeclaration):
        reasons += _experts_beyond(declaration, asked)
    for reason in reasons:
        yield Beyond("CAP-1", reason)


def require_capacity(declaration: ConsumerDeclaration, group: RankGroup, capacity: TailCapacity) -> None:
    """Raises UnsupportedError with the first declared limit of a consumer that a group and a capacity exceed."""
    asked = Request(
        device=group.device.type,
        dtype=dtype_name(capacity.dtype),
        top_k=capacity.top_k,
        hidden_size=capacity.hidden_size,
        tokens=capacity.max_tokens,
        ranks=group.size,
    )
    refuse(declaration.name, beyond(declaration, asked))


def require_layer(declaration: ProducerDeclaration, layer: MoELayer) -> None:
    """Raises UnsupportedError with the first declared limit of a producer that a layer exceeds."""
    weights = layer.experts
    asked = Request(
        device=layer.device.type,
        dtype=dtype_name(layer.dtype),
        top_k=layer.routing.top_k,
        hidden_size=layer.hidden_size,
        method=layer.routing.method,
        num_experts=layer.num_experts,
        activation=layer.activation,
        expert_biases=any(b is not None for b in (weights.up_bias, weights.gate_bias, weights.down_bias)),
        expert_parallel=layer.num_local_experts != layer.num_experts,
    )
    refuse(declaration.name, beyond(declaration, asked))


def require_tokens(declaration: ConsumerDeclaration | ProducerDeclaration, num_tokens: int) -> None:
    """Raises UnsupportedError where one call has more tokens than are declared."""
    if reason := _size_beyond(declaration, "max_tokens", num_tokens):
        refuse(declaration.name, iter([Beyond("CAP-1", reason)]))


def refuse(name: str, exceeded: Iterator[Beyond]) -> None:
    """Raises UnsupportedError with the first of ``exceeded`` and the backend's name; returns where there is none."""
    if (first := next(exceeded, None)) is not None:
        raise UnsupportedError(f"{name}: {first}", clause=first.clause)


def _choices_beyond(declaration: ConsumerDeclaration | ProducerDeclaration, asked: Request) -> Iterator[str]:
    chosen = {
        "dtypes": ("", asked.dtype),
        "weights_dtypes": ("weights dtype ", asked.weights_dtype),
        "routing_methods": ("", asked.method),
        "activations": ("", asked.activation),
    }
    for field, (what, value) in chosen.items():
        supported: frozenset[str] | None = getattr(declaration, field, None)
        if supported is not None and value is not None and value not in supported:
            yield f"{what}{value} is not among its {field} ({_listed(supported)})"


def _sizes_beyond(declaration: ConsumerDeclaration | ProducerDeclaration, asked: Request) -> Iterator[str]:
    sizes = {
        "max_tokens": asked.tokens,
        "max_top_k": asked.top_k,
        "max_hidden_size": asked.hidden_size,
        "max_experts": asked.num_experts,
    }
    yield from filter(None, (_size_beyond(declaration, field, size) for field, size in sizes.items()))
    if asked.hidden_size % (multiple := declaration.hidden_size_multiple):
        yield f"hidden size must be a multiple of {multiple}, got {asked.hidden_size}"


def _size_beyond(declaration: ConsumerDeclaration | ProducerDeclaration, field: str, size: int | None) -> str:
    limit: int | None = getattr(declaration, field, None)
    return "" if limit is None or size is None or size <= limit else f"{field} is {limit}, got {size}"


def _experts_beyond(declaration: ProducerDeclaration, asked: Request) -> Iterator[str]:
    for limit in declaration.routing_limits:
        many = asked.num_experts is not None and asked.num_experts > limit.max_experts
        if limit.method is asked.method and (many or asked.top_k > limit.max_top_k):
            most = f"{limit.max_experts} experts and top_k {limit.max_top_k}"
            experts = "" if asked.num_experts is None else f"{asked.num_experts} experts and "
            yield f"routing_limits of {limit.method.value} are {most}, got {experts}top_k {asked.top_k}"
    if asked.expert_biases and not declaration.expert_biases:
        yield "expert biases are declared unsupported"
    if asked.expert_parallel and not declaration.expert_parallel:
        yield "expert parallelism is declared unsupported"


def _listed(values: AbstractSet[str] | AbstractSet[int]) -> str:
    return ", ".join(map(str, sorted(values))) or "none"
