"""A producer and a consumer with one case: the layer's real output goes through the tail, judged at the boundary."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from moe_conformance.cases.case import LayerCase, TailCase
from moe_conformance.cases.tail_data import TailInputs, move_output
from moe_conformance.subjects.calls import Settings
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.subjects.tail import TailSubject
from moe_conformance.verdicts import BackendError, UnsupportedCaseError
from moe_contract import Consumer, MoEConfig
from moe_contract.declarations import WeightsDtype
from moe_contract.dtypes import dtype_name
from moe_contract.negotiation import Negotiation, negotiate


@dataclass
class PairSubject:
    """What a pair test is handed. Each stage is judged from the bits that it was given."""

    layer: LayerSubject
    consumer_name: str
    consumer: Consumer
    case: LayerCase
    clause: str
    settings: Settings = field(default_factory=Settings)

    @cached_property
    def tail(self) -> TailSubject:
        """The consumer with the shapes that the producer hands over."""
        case = TailCase(
            tokens=self.case.tokens,
            top_k=self.case.top_k,
            hidden_size=self.case.hidden_size,
            ranks=self.case.ranks,
            dtype=self.case.dtype,
            stratum="normal",
            weights_dtype=self.weights_dtype,
            scale=self.case.scale,
            weight_bias=self.case.weight_bias,
            route_major=self.layer.declaration.route_major,
        )
        return TailSubject(self.consumer_name, self.consumer, case, self.clause, self.settings)

    @property
    def weights_dtype(self) -> WeightsDtype:
        """The dtype in which this producer hands over the routing weights of this case."""
        dtype = self.layer.expectation(0, self.layer.config()).weights_dtype
        return "float32" if dtype_name(dtype) == "float32" else "activation"

    @property
    def headroom(self) -> float | None:
        """The largest error / bound of both sides. Asked for after any outcome, so it never makes the tail."""
        tail = vars(self).get("tail")
        known = [side.headroom for side in (self.layer, tail) if side is not None and side.headroom is not None]
        return max(known, default=None)

    def negotiation(self) -> Negotiation:
        """Whether this producer may hand this consumer an unfinalized output of this size (DEFER-4)."""
        return negotiate(
            self.layer.declaration,
            self.consumer.declaration,
            dtype=self.layer.parts[0].dtype,
            weights_dtype=self.layer.expectation(0, self.layer.config()).weights_dtype,
            top_k=self.case.top_k,
            hidden_size=self.case.hidden_size,
            max_tokens=max(1, self.case.tokens),
            tp_size=self.case.ranks,
            device=self.settings.device,
            routing_method=self.case.method,
            ep_size=self.case.ep,
            num_experts=self.case.num_experts,
        )

    def require_support(self) -> None:
        """Raises UnsupportedCaseError where either declaration does not cover the case, or they do not fit."""
        self.layer.require_support()
        negotiated = self.negotiation()
        if self.case.ranks > 1 and self.layer.defers and not negotiated.deferred:
            raise UnsupportedCaseError("; ".join(negotiated.reasons))
        self.tail.require_support()

    def hand_over(self, config: MoEConfig | None = None) -> TailInputs:
        """The layer's outputs on every rank, as the tail is given them; raises where one breaks the contract."""
        config = config or self.layer.config()
        outputs = self.layer.run_forward(config)
        wrong = [output for output in outputs if isinstance(output, Tensor)]
        if wrong:
            raise BackendError(f"{self.layer.name}: the layer's forward pass returned a tensor, expected a MoEOutput")
        self.layer.require_form(outputs, config, tier="values")  # or the consumer is blamed for what it was handed
        inputs = self.layer.inputs
        pending = tuple(output for output in outputs if not isinstance(output, Tensor))
        return TailInputs(
            outputs=tuple(move_output(output, torch.device("cpu")) for output in pending),
            residual=inputs.residual,
            norm_weight=inputs.norm_weight,
            eps=1e-6,
            weight_bias=self.case.weight_bias,
        )
