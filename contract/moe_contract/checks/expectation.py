"""What one call's output has to look like, told to the checks by whoever made the call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_contract.config import MoEConfig
from moe_contract.declarations import ProducerDeclaration
from moe_contract.layer import MoELayer


@dataclass(frozen=True)
class Expectation:
    """The call's sizes and dtypes. ``hidden_size`` is the logical one; ``dtype`` is the activation dtype."""

    num_tokens: int
    top_k: int
    hidden_size: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    """What the producer declares: the activation dtype or, from 1.1, float32."""
    device: torch.device | None = None
    """None: any, but the same for all tensors."""
    deferred: bool | None = None
    """Whether the output must be unfinalized; None where either form is right."""
    route_major: bool = False
    """Whether route-major rows (1.1) are accepted; never demanded."""
    rank: int | None = None
    """Whose output it is; only named in violations."""

    @classmethod
    def of_call(
        cls,
        declaration: ProducerDeclaration,
        layer: MoELayer,
        config: MoEConfig,
        num_tokens: int,
        rank: int | None = None,
    ) -> Expectation:
        """What this producer's output for ``num_tokens`` tokens has to be, from its declaration and the config."""
        can_defer = declaration.defers(layer.routing.method, layer.hidden_size)
        float32 = "float32" in declaration.weights_dtypes
        return cls(
            num_tokens=num_tokens,
            top_k=layer.routing.top_k,
            hidden_size=layer.hidden_size,
            dtype=layer.dtype,
            weights_dtype=torch.float32 if float32 else layer.dtype,
            device=layer.device,
            deferred=can_defer and config.should_defer(num_tokens),
            route_major=declaration.route_major,
            rank=rank,
        )
