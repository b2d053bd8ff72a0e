"""May this producer hand its unfinalized form to this consumer? Asked before the first call, not assumed (DEFER-4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_contract.config import MoEConfig
from moe_contract.declarations import ConsumerDeclaration, ProducerDeclaration, WeightsDtype
from moe_contract.dtypes import dtype_name
from moe_contract.layer import RoutingMethod


@dataclass(frozen=True)
class Negotiation:
    """The answer, with one line for each reason against deferral."""

    deferred: bool
    """Whether the producer may hand over the unfinalized form."""
    reasons: tuple[str, ...]
    """Why not; empty exactly where ``deferred``."""
    max_tokens: int
    """The largest T that may be deferred; 0 where none may. A larger call is finalized (DEFER-1)."""

    def config(self, tp_size: int, ep_size: int = 1) -> MoEConfig:
        """The config to load the producer with."""
        return MoEConfig(
            defer_moe_finalize=self.deferred,
            tp_size=tp_size,
            ep_size=ep_size,
            max_deferred_tokens=self.max_tokens,
        )


@dataclass(frozen=True)
class _Call:
    dtype: torch.dtype
    weights_dtype: torch.dtype
    top_k: int
    hidden_size: int
    device: torch.device

    @property
    def weights_kind(self) -> WeightsDtype | None:
        """The weights dtype in a declaration's words; None for one that the contract does not have."""
        if self.weights_dtype == self.dtype:
            return "activation"
        return "float32" if self.weights_dtype == torch.float32 else None


def negotiate(
    producer: ProducerDeclaration,
    consumer: ConsumerDeclaration,
    *,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None = None,
    top_k: int,
    hidden_size: int,
    max_tokens: int,
    tp_size: int,
    device: torch.device | str,
    routing_method: RoutingMethod,
    ep_size: int = 1,
) -> Negotiation:
    """Whether ``producer`` may defer towards ``consumer`` in this setting, and up to how many tokens.

    ``weights_dtype`` None means what the producer declares. A token limit below ``max_tokens`` does not forbid
    deferral, it lowers the cap.
    """
    if weights_dtype is None:
        weights_dtype = torch.float32 if "float32" in producer.weights_dtypes else dtype
    call = _Call(dtype, weights_dtype, top_k, hidden_size, torch.device(device))
    cap = min(limit for limit in (max_tokens, producer.max_tokens, consumer.max_tokens) if limit is not None)
    reasons = [
        *_producer_reasons(producer, routing_method, ep_size, hidden_size),
        *_limit_reasons("producer", producer, call),
        *_limit_reasons("consumer", consumer, call),
        *_pair_reasons(producer, consumer, tp_size),
    ]
    if cap < 1:
        reasons.append(f"max_tokens is {max_tokens}: no call is small enough to defer")
    return Negotiation(deferred=not reasons, reasons=tuple(reasons), max_tokens=0 if reasons else cap)


def _producer_reasons(
    producer: ProducerDeclaration, method: RoutingMethod, ep_size: int, hidden_size: int
) -> list[str]:
    name = f"producer {producer.name}"
    reasons = []
    if not producer.can_defer:
        reasons.append(f"{name} always finalizes (can_defer is False)")
    if method not in producer.routing_methods:
        reasons.append(f"{name} does not support routing method {method.value}")
    if method in producer.never_deferred:
        reasons.append(f"{name} always finalizes routing method {method.value} (never_deferred)")
    if hidden_size % (multiple := producer.deferral_multiple):
        reasons.append(f"{name} pads hidden size {hidden_size} to a multiple of {multiple}, so it finalizes (ROWS-4)")
    if ep_size > 1 and not producer.expert_parallel:
        reasons.append(f"{name} does not support expert parallelism, ep_size is {ep_size}")
    return reasons


def _limit_reasons(side: str, declared: ProducerDeclaration | ConsumerDeclaration, call: _Call) -> list[str]:
    """What this side's declaration says against the call itself."""
    name = f"{side} {declared.name}"
    reasons = []
    if call.device.type not in declared.devices:
        reasons.append(f"{name} runs on {_listed(declared.devices)}, not on {call.device.type}")
    if dtype_name(call.dtype) not in declared.dtypes:
        reasons.append(f"{name} takes activations in {_listed(declared.dtypes)}, not {dtype_name(call.dtype)}")
    if call.weights_kind not in declared.weights_dtypes:
        verb = "emits" if side == "producer" else "reads"
        got = dtype_name(call.weights_dtype)
        reasons.append(f"{name} {verb} routing weights in {_listed(declared.weights_dtypes)} dtype, not {got}")
    if declared.max_top_k is not None and call.top_k > declared.max_top_k:
        reasons.append(f"{name} takes at most top_k {declared.max_top_k}, got {call.top_k}")
    if declared.max_hidden_size is not None and call.hidden_size > declared.max_hidden_size:
        reasons.append(f"{name} takes at most hidden size {declared.max_hidden_size}, got {call.hidden_size}")
    if call.hidden_size % declared.hidden_size_multiple:
        multiple = declared.hidden_size_multiple
        reasons.append(f"{name} needs a hidden size that is a multiple of {multiple}, got {call.hidden_size}")
    return reasons


def _pair_reasons(producer: ProducerDeclaration, consumer: ConsumerDeclaration, tp_size: int) -> list[str]:
    reasons = []
    if tp_size <= 1:
        reasons.append(f"tp_size is {tp_size}: there is no reduction to fuse the finalize with")
    elif consumer.world_sizes is not None and tp_size not in consumer.world_sizes:
        sizes = ", ".join(map(str, sorted(consumer.world_sizes)))
        reasons.append(f"consumer {consumer.name} supports {sizes} ranks, not {tp_size}")
    if producer.route_major and not consumer.route_major:
        reasons.append(
            f"producer {producer.name} emits route-major rows, which consumer {consumer.name} does not accept"
        )
    return reasons


def _listed(names: frozenset[str]) -> str:
    return " or ".join(sorted(names)) or "none"
