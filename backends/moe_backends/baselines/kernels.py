"""Plain Triton kernels, one program a token: finalize, add ranks and norm, and both in one. Imports triton."""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-not-found, import-untyped"
# Device code: its arguments are pointers and compile-time constants, for which Triton has no annotations.
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _contribution(
    rows, weights, index, shared, token, column, inside, scale,
    hidden: tl.constexpr, top_k: tl.constexpr, has_shared: tl.constexpr,
):  # fmt: skip
    """scale * sum over slots of weight * row, + shared, in float32."""
    total = tl.zeros(column.shape, dtype=tl.float32)
    for slot in tl.static_range(top_k):
        row = tl.load(index + token * top_k + slot).to(tl.int64)
        weight = tl.load(weights + token * top_k + slot).to(tl.float32)
        values = tl.load(rows + row * hidden + column, mask=inside & (row >= 0), other=0.0).to(tl.float32)
        total += tl.where(row >= 0, weight * values, 0.0)
    total = total * scale
    if has_shared:
        total += tl.load(shared + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def _residual_norm(
    total, residual, gamma, residual_out, norm_out, token, column, inside, eps, weight_bias, hidden: tl.constexpr
):
    """Adds the residual, rounds, norms what was rounded, stores both."""
    at = token * hidden + column
    summed = (total + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(residual_out.dtype.element_ty)
    tl.store(residual_out + at, summed, mask=inside)
    rounded = summed.to(tl.float32)
    root = tl.rsqrt(tl.sum(rounded * rounded) / hidden + eps)
    gain = tl.load(gamma + column, mask=inside, other=0.0).to(tl.float32) + weight_bias
    tl.store(norm_out + at, (rounded * root * gain).to(norm_out.dtype.element_ty), mask=inside)


@triton.jit
def _finalize(
    rows, weights, index, shared, published, scale,
    hidden: tl.constexpr, top_k: tl.constexpr, block: tl.constexpr, has_shared: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden
    total = _contribution(rows, weights, index, shared, token, column, inside, scale, hidden, top_k, has_shared)
    tl.store(published + token * hidden + column, total.to(published.dtype.element_ty), mask=inside)


@triton.jit
def _add_ranks_norm(
    published, residual, gamma, residual_out, norm_out, rank_stride, eps, weight_bias,
    ranks: tl.constexpr, hidden: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden
    total = tl.zeros([block], dtype=tl.float32)
    for rank in tl.static_range(ranks):
        part = published + rank * rank_stride + token * hidden + column
        total += tl.load(part, mask=inside, other=0.0).to(tl.float32)
    _residual_norm(total, residual, gamma, residual_out, norm_out, token, column, inside, eps, weight_bias, hidden)


@triton.jit
def _finalize_norm(
    rows, weights, index, shared, residual, gamma, residual_out, norm_out, scale, eps, weight_bias,
    hidden: tl.constexpr, top_k: tl.constexpr, block: tl.constexpr, has_shared: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < hidden
    total = _contribution(rows, weights, index, shared, token, column, inside, scale, hidden, top_k, has_shared)
    published = total.to(residual_out.dtype.element_ty).to(tl.float32)
    _residual_norm(published, residual, gamma, residual_out, norm_out, token, column, inside, eps, weight_bias, hidden)


def _shape(hidden: int) -> dict[str, int]:
    """One program covers a token; 16 warps once a thread would otherwise hold more than 16 elements."""
    return {"block": triton.next_power_of_2(hidden), "num_warps": 8 if hidden <= 4096 else 16}


def finalize(
    rows: Tensor, weights: Tensor, index: Tensor, shared: Tensor | None, published: Tensor, *, scale: float
) -> None:
    """``published [T, H]`` = scale * top-k sum + shared, rounded once. ``rows [P, H]``, ``index [T, K]``."""
    tokens, hidden = published.shape
    given = rows if shared is None else shared
    _finalize[(tokens,)](
        rows, weights, index, given, published, scale,
        hidden=hidden, top_k=index.shape[1], has_shared=shared is not None, **_shape(hidden),
    )  # fmt: skip


def add_ranks_norm(
    published: Tensor, residual: Tensor, gamma: Tensor, residual_out: Tensor, norm_out: Tensor, *,
    eps: float, weight_bias: float,
) -> None:  # fmt: skip
    """Adds ``published [N, slots, H]`` in rank order and the residual ``[T, H]``, T at most slots; then the norm."""
    tokens, hidden = residual.shape
    _add_ranks_norm[(tokens,)](
        published, residual, gamma, residual_out, norm_out, published.stride(0), eps, weight_bias,
        ranks=published.shape[0], hidden=hidden, **_shape(hidden),
    )  # fmt: skip


def finalize_norm(
    rows: Tensor, weights: Tensor, index: Tensor, shared: Tensor | None, residual: Tensor, gamma: Tensor,
    residual_out: Tensor, norm_out: Tensor, *, scale: float, eps: float, weight_bias: float,
) -> None:  # fmt: skip
    """One rank alone: both steps in one kernel, with the rounding of profile C between them."""
    tokens, hidden = residual.shape
    given = rows if shared is None else shared
    _finalize_norm[(tokens,)](
        rows, weights, index, given, residual, gamma, residual_out, norm_out, scale, eps, weight_bias,
        hidden=hidden, top_k=index.shape[1], has_shared=shared is not None, **_shape(hidden),
    )  # fmt: skip
