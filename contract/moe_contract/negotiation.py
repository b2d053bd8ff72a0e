"""May this producer hand its unfinalized form to this consumer? Asked before the first call, not assumed (DEFER-4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_contract.config import MoEConfig
from moe_contract.declarations import ConsumerDeclaration, ProducerDeclaration
from moe_contract.dtypes import dtype_name
from moe_contract.layer import RoutingMethod
from moe_contract.limits import Request, beyond


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
    num_experts: int | None = None,
) -> Negotiation:
    """Whether ``producer`` may defer towards ``consumer`` in this setting, and up to how many tokens.

    ``weights_dtype`` None means what the producer declares; ``num_experts``, of the whole layer, None means that it is
    not known yet and its limits are not asked. A token limit below ``max_tokens`` does not forbid deferral, it lowers
    the cap.
    """
    if weights_dtype is None:
        weights_dtype = torch.float32 if "float32" in producer.weights_dtypes else dtype
    asked = Request(
        device=torch.device(device).type,
        dtype=dtype_name(dtype),
        weights_dtype="activation" if weights_dtype == dtype else dtype_name(weights_dtype),
        top_k=top_k,
        hidden_size=hidden_size,
        method=routing_method,
        num_experts=num_experts,
        expert_parallel=ep_size > 1,
        ranks=tp_size if tp_size > 1 else None,
    )
    cap = min(limit for limit in (max_tokens, producer.max_tokens, consumer.max_tokens) if limit is not None)
    reasons = [
        *_producer_reasons(producer, routing_method, hidden_size),
        *(f"producer {producer.name}: {each.reason}" for each in beyond(producer, asked)),
        *(f"consumer {consumer.name}: {each.reason}" for each in beyond(consumer, asked)),
        *_pair_reasons(producer, consumer, tp_size),
    ]
    if cap < 1:
        reasons.append(f"max_tokens is {max_tokens}: no call is small enough to defer")
    return Negotiation(deferred=not reasons, reasons=tuple(reasons), max_tokens=0 if reasons else cap)


def _producer_reasons(producer: ProducerDeclaration, method: RoutingMethod, hidden_size: int) -> list[str]:
    """What this producer never defers, beside its limits."""
    name = f"producer {producer.name}"
    reasons = []
    if not producer.can_defer:
        reasons.append(f"{name} always finalizes (can_defer is False)")
    if method in producer.never_deferred:
        reasons.append(f"{name} always finalizes routing method {method.value} (never_deferred)")
    if hidden_size % (multiple := producer.deferral_multiple):
        reasons.append(f"{name} pads hidden size {hidden_size} to a multiple of {multiple}, so it finalizes (ROWS-4)")
    return reasons


def _pair_reasons(producer: ProducerDeclaration, consumer: ConsumerDeclaration, tp_size: int) -> list[str]:
    reasons = []
    if tp_size <= 1:
        reasons.append(f"tp_size is {tp_size}: there is no reduction to fuse the finalize with")
    if producer.route_major and not consumer.route_major:
        reasons.append(
            f"producer {producer.name} emits route-major rows, which consumer {consumer.name} does not accept"
        )
    return reasons
