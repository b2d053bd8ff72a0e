"""A complete third-party consumer: an fp32 tail (rounding profile C) in plain torch."""

import torch

from moe_contract import consumer, finalize


@consumer(name="acme-tail", version="0.1", profile="C", weights_dtypes={"activation", "float32"})
def acme_tail(group, output, residual, norm_weight, *, eps, weight_bias=0.0):
    """One rank's call: local sum, all-reduce in rank order, residual, RMSNorm."""
    local = finalize(
        output.routed,
        routed_scaling_factor=output.routed_scaling_factor,
        shared_output=output.shared_output,
    )
    total = torch.zeros_like(residual, dtype=torch.float32)
    for part in group.all_gather(local) if group.size > 1 else [local]:
        total += part.float()
    residual_out = (total + residual.float()).to(residual.dtype)
    x = residual_out.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    norm_out = (x * (norm_weight.float() + weight_bias)).to(residual.dtype)
    return residual_out, norm_out
