"""A third-party consumer with a workspace of its own: what a class does that `@consumer` does for a function."""

import torch

from moe_contract import ConsumerDeclaration, TailOutput, finalize
from moe_contract.call_checks import require_call
from moe_contract.limits import require_capacity


class AcmeConsumer:
    """What the suite is given by name."""

    declaration = ConsumerDeclaration(name="acme-stateful", version="0.1", profile="C", max_hidden_size=8192)

    def open(self, group, capacity):
        """Once, on every rank at the same time."""
        require_capacity(self.declaration, group, capacity)  # CAP-1: refuse here, before any memory is taken
        return AcmeTail(self.declaration, group, capacity)


class AcmeTail:
    """One rank's opened tail."""

    def __init__(self, declaration, group, capacity):
        self.declaration, self.group, self.capacity = declaration, group, capacity
        self.total = torch.empty(capacity.max_tokens, capacity.hidden_size, device=group.device)

    def __call__(self, output, residual, norm_weight, *, eps, weight_bias=0.0, quant=None):
        """One call, by every rank."""
        tokens = residual.shape[0]
        require_call(self.declaration, self.capacity, output, tokens)  # DEFER-4: alike on every rank, before any talk
        local = finalize(
            output.routed,
            routed_scaling_factor=output.routed_scaling_factor,
            shared_output=output.shared_output,
        )
        total = self.total[:tokens].zero_()
        for part in self.group.all_gather(local) if self.group.size > 1 else [local]:
            total += part.float()
        residual_out = (total + residual.float()).to(residual.dtype)
        x = residual_out.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        norm_out = (x * (norm_weight.float() + weight_bias)).to(residual.dtype)
        return TailOutput(residual_out, norm_out)

    def close(self):
        """Releases the workspace."""
        self.total = None


backend = AcmeConsumer()
