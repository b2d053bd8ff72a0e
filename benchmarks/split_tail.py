"""The competitor without communication: one Triton program a token does top-k sum, shared output, residual and norm."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _finalize_norm(
    rows, weights, index, shared, residual, gamma, residual_out, norm_out, scale, eps,
    hidden: tl.constexpr, top_k: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden
    total = tl.zeros([block], dtype=tl.float32)
    for slot in tl.static_range(top_k):
        row = tl.load(index + token * top_k + slot).to(tl.int64)
        weight = tl.load(weights + token * top_k + slot).to(tl.float32)
        values = tl.load(rows + row * hidden + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        total += tl.where(row >= 0, weight * values, 0.0)
    at = token * hidden + column
    total = total * scale + tl.load(shared + at, mask=inside, other=0.0).to(tl.float32)
    published = total.to(residual_out.dtype.element_ty).to(tl.float32)
    summed = (published + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(
        residual_out.dtype.element_ty
    )
    tl.store(residual_out + at, summed, mask=inside)
    rounded = summed.to(tl.float32)
    root = tl.rsqrt(tl.sum(rounded * rounded) / hidden + eps)
    gain = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(norm_out + at, (rounded * root * gain).to(norm_out.dtype.element_ty), mask=inside)


def finalize_norm(
    rows: Tensor, weights: Tensor, index: Tensor, shared: Tensor, residual: Tensor, gamma: Tensor,
    residual_out: Tensor, norm_out: Tensor, *, scale: float, eps: float,
) -> None:  # fmt: skip
    """``rows [P, H]``, ``weights``, ``index`` [T, K]; the rest ``[T, H]`` and ``gamma [H]``. Writes both outputs."""
    tokens, hidden = residual.shape
    block = triton.next_power_of_2(hidden)
    _finalize_norm[(tokens,)](
        rows, weights, index, shared, residual, gamma, residual_out, norm_out, scale, eps,
        hidden, index.shape[1], block, num_warps=8 if hidden <= 4096 else 16,
    )  # fmt: skip
