"""A MoE layer's forward pass around any producer: what an engine does between a kernel and a fused tail."""

from __future__ import annotations

from torch import Tensor

from moe_contract.backend import Producer, RankGroup
from moe_contract.completion import complete
from moe_contract.config import MoEConfig
from moe_contract.layer import MoELayer, PrecomputedRouting, RoutingMethod
from moe_contract.outputs import MoEOutput
from moe_contract.shared_expert import shared_expert_output


class MoEForward:
    """One rank's layer: routed experts by ``producer``, the shared expert in PyTorch, the scale stated once.

    With ``reduce_results`` the call finishes its own output over ``group`` and returns a tensor; without, it returns
    a ``MoEOutput`` for a tail that reduces. Both routes give the same bits when the tail is ``complete``.
    """

    def __init__(
        self,
        producer: Producer,
        layer: MoELayer,
        config: MoEConfig,
        group: RankGroup | None = None,
        *,
        reduce_results: bool = False,
    ) -> None:
        if reduce_results and group is None and config.tp_size > 1:
            raise ValueError(
                f"reduce_results=True over tp_size {config.tp_size} needs a RankGroup, got none (RED-1: the sum over "
                "ranks would be missing)"
            )
        self.declaration = producer.declaration
        self.layer = layer
        self.config = config
        self.group = group
        self.reduce_results = reduce_results
        self._run = producer.load(layer, config)

    def __call__(self, hidden_states: Tensor, router_logits: Tensor | PrecomputedRouting) -> MoEOutput | Tensor:
        """The layer's output: pending, or finished and reduced, as ``reduce_results`` says."""
        # The shared expert first: a producer that writes its input (OUT-4) must not change it.
        shared_output = shared_expert_output(self.layer, hidden_states)
        output = MoEOutput(
            routed=self._run(hidden_states, router_logits),
            shared_output=shared_output,
            routed_scaling_factor=self._remaining_scale(router_logits),
        )
        return complete(output, self.group) if self.reduce_results else output

    def _remaining_scale(self, router_logits: Tensor | PrecomputedRouting) -> float:
        """The factor still to be applied (SCALE-1). Weights routed outside the kernel are verbatim: never folded."""
        routing = self.layer.routing
        outside = routing.method is RoutingMethod.PRECOMPUTED or isinstance(router_logits, PrecomputedRouting)
        folded = not outside and self.declaration.folds(routing.method)
        return 1.0 if folded else routing.routed_scaling_factor
