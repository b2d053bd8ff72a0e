"""DEFER: deferral at the wrong time, to the wrong consumer, or without an end."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from torch import Tensor

from moe_conformance.faults import delta_producer, plain_tail, wiring
from moe_conformance.faults.bases import base_producer
from moe_conformance.faults.delta_producer import Call
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainConsumer, PlainTail
from moe_contract import MoEConfig, MoEOutput, RankGroup, RoutingMethod, TailCapacity, complete, finalize
from moe_contract.declarations import ProducerDeclaration
from moe_contract.negotiation import Negotiation

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)
producer_fault = partial(delta_producer.producer_fault, into=FAULTS)
engine_fault = partial(wiring.engine_fault, into=FAULTS)


class _Live(MoEConfig):
    """The engine's config as it is at each call, seen with some fields changed."""

    def __init__(self, config: MoEConfig, **seen: Any) -> None:
        super().__init__(**config.model_dump())
        object.__setattr__(self, "_source", (config, seen))

    def should_defer(self, num_tokens: int) -> bool:
        """As the changed fields say."""
        config, seen = self._source  # type: ignore[attr-defined]  # set in __init__
        return MoEConfig.should_defer(config.model_copy(update=seen), num_tokens)


@producer_fault("DEFER-1", "config", smallest="tp=1")
def defers_without_a_reduction(config: MoEConfig) -> MoEConfig:
    """Deferral does not ask for more than one rank."""
    return _Live(config, tp_size=2)


@producer_fault("DEFER-1", "config", smallest="a batch of the cap plus one")
def cap_ignored(config: MoEConfig) -> MoEConfig:
    """Deferral does not end at the cap."""
    return _Live(config, max_deferred_tokens=None)


@producer_fault("DEFER-1", "config", smallest="a batch of exactly the cap")
def cap_is_exclusive(config: MoEConfig) -> MoEConfig:
    """A batch at the cap is finalized."""
    cap = config.max_deferred_tokens
    return config if cap is None else _Live(config, max_deferred_tokens=max(0, cap - 1))


@producer_fault("DEFER-1", "config", smallest="flag off, tp=2")
def defers_unasked(config: MoEConfig) -> MoEConfig:
    """Deferral needs no flag."""
    return _Live(config, defer_moe_finalize=True)


@producer_fault("DEFER-2", "config", smallest="the second call")
def flag_read_at_construction(config: MoEConfig) -> MoEConfig:
    """The flag is copied when the layer is built."""
    return config.model_copy()


@producer_fault("DEFER-2", "any", smallest="flag set, then cleared")
def flag_never_cleared(output: Any, call: Call) -> Any:
    """Once a loaded producer has deferred it goes on."""
    if not isinstance(output, Tensor):
        call.kept["sticky"] = True
        return output
    if call.kept.get("sticky") and len(output):
        config = call.config.model_copy(update={"defer_moe_finalize": True})
        return base_producer("reference").load(call.layer, config)(call.hidden_states, call.router_logits)
    return output


@producer_fault("DEFER-3", bugs=("TensorRT-LLM#15226", "TensorRT-LLM#14314"), smallest="deepseek-v3")
def one_method_never_defers(output: Any, call: Call) -> Any:
    """DeepSeek routing finalizes although the declaration says that it defers."""
    return finalize(output) if call.layer.routing.method is RoutingMethod.DEEPSEEK_V3 else output


@producer_fault("DEFER-3", bugs=("rtp-llm#1325",), can_defer=False)
def defers_though_it_says_never(output: Any, call: Call) -> Any:
    """A producer that declares that it cannot defer obeys the flag."""
    return output


@producer_fault("DEFER-3", never_deferred=frozenset({RoutingMethod.LLAMA4, RoutingMethod.DEEPSEEK_V3}))
def defers_a_method_declared_never(output: Any, call: Call) -> Any:
    """A routing method that is declared never to defer does."""
    return output


class _Unbounded(PlainTail):
    """Does not compare T with its capacity."""

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        """Checks everything else."""
        larger = TailCapacity(1 << 30, self.capacity.hidden_size, self.capacity.top_k, self.capacity.dtype)
        capacity, self.capacity = self.capacity, larger
        try:
            super().check(output, residual)
        finally:
            self.capacity = capacity


@consumer_fault("DEFER-4", bugs=("sglang#34921",), smallest="one token above the capacity")
class CallBeyondItsCapacityRuns(_Unbounded):
    """A call with more tokens than the tail was opened for is run."""


@consumer_fault("DEFER-4", smallest="one token above the capacity")
class CapacityCheckedAfterTheExchange(_Unbounded):
    """The capacity is compared after the ranks have exchanged their parts."""

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """Too late."""
        if parts[0].shape[0] > self.capacity.max_tokens:
            raise ValueError(f"CAP-1: {parts[0].shape[0]} tokens, capacity {self.capacity.max_tokens}")
        return super().add_ranks(parts)


class _ReadsActivationWeights(PlainTail):
    """Declares weights in the activation dtype alone."""

    declares: ClassVar[dict[str, Any]] = {"weights_dtypes": frozenset({"activation"})}


def _granted(producer: ProducerDeclaration, consumer: object, **call: Any) -> Negotiation:
    return Negotiation(deferred=True, reasons=(), max_tokens=call["max_tokens"])


def deferral_granted_unasked(producer: ProducerDeclaration, consumer: object, **call: Any) -> Negotiation:
    """The engine defers towards a consumer that does not read the producer's weights dtype."""
    return _granted(producer, consumer, **call)


engine_fault("DEFER-4", wiring.NEGOTIATE, producer=base_producer("reference-fp32-weights"),
             consumer=PlainConsumer(_ReadsActivationWeights), smallest="float32 weights")(
                 deferral_granted_unasked)  # fmt: skip


@producer_fault("DEFER-5", "finalized", smallest="tp=2, flag off")
def finalized_path_loses_the_last_expert(output: Tensor, call: Call) -> Tensor:
    """The kernel's own finalize, with more than one rank, leaves a part of the sum out."""
    return output * 0.9375 if call.config.tp_size > 1 else output


@producer_fault("DEFER-5", "finalized", smallest="tp=2, flag off")
def finalized_path_reads_the_next_token(output: Tensor, call: Call) -> Tensor:
    """The kernel's own finalize, with more than one rank, is one token off."""
    return output.roll(1, 0) if call.config.tp_size > 1 else output


def completed_without_a_reduction(output: Any, group: RankGroup | None = None) -> Tensor:
    """The last holder finalizes its own part and forgets that it was to be reduced."""
    return complete(output)


engine_fault(
    "DEFER-6", wiring.COMPLETE[0], bugs=("TensorRT-LLM#6850", "sglang#28619"), smallest="two ranks, one layer"
)(completed_without_a_reduction)


def captured_without_the_shared_part(output: Any, group: RankGroup | None = None) -> Tensor:
    """A capture completes the routed part and leaves the shared output out."""
    return complete(output.routed if isinstance(output, MoEOutput) else output, group)


engine_fault("DEFER-6", *wiring.COMPLETE, bugs=("sglang#39286",), smallest="two ranks, shared output")(
    captured_without_the_shared_part
)


def pending_taken_for_a_tensor(output: Any) -> Tensor:
    """Code that handles only tensors takes a pending output without complaint."""
    taken: Tensor = getattr(output, "routed", output)
    return taken


engine_fault(
    "DEFER-6", "moe_conformance.suite.test_defer.require_tensor", bugs=("sglang#28619",), smallest="two ranks"
)(pending_taken_for_a_tensor)
