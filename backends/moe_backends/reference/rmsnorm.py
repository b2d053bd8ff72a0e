"""RMSNorm as NORM-1 fixes it: fp32 statistics of the rounded residual, one rounding of the result."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(residual_out: Tensor, norm_weight: Tensor, *, eps: float, weight_bias: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x^2) + eps) * (norm_weight + weight_bias)`` over the last dimension.

    Args:
        residual_out: ``[T, H]``, already rounded to the activation dtype.
        norm_weight: ``[H]`` in its own dtype, which is never rounded to the activation dtype.
        eps: added to the mean square, inside the root.
        weight_bias: 1.0 gives the (1 + gamma) form (NORM-2).

    Returns:
        ``[T, H]`` in the dtype of ``residual_out``.
    """
    x = residual_out.float()
    mean_square = x.square().mean(dim=-1, keepdim=True)
    gain = norm_weight.float() + weight_bias
    return (x * torch.rsqrt(mean_square + eps) * gain).to(residual_out.dtype)
