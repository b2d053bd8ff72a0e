"""What has one entry a route: weights and map, whose shape and strides say which entry is whose. Metadata alone."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_contract.checks.expectation import Expectation
from moe_contract.checks.findings import MAP, WEIGHTS, Findings, is_readable, shape_text
from moe_contract.dtypes import dtype_name


def check_weights(weights: Tensor, expectation: Expectation, found: Findings) -> None:
    """``expert_weights``: dtype (WGT-2) and form (WGT-1)."""
    if weights.dtype is not expectation.weights_dtype:
        expected = f"the declared weights dtype {dtype_name(expectation.weights_dtype)}"
        found.add("WGT-2", WEIGHTS, dtype_name(weights.dtype), expected)
    if not _has_route_shape(weights, expectation):
        got, hint = _describe_routes(weights, expectation)
        found.add("WGT-1", WEIGHTS, got, _routes_expected(expectation), hint)


def check_map(mapped: Tensor, expectation: Expectation, found: Findings) -> None:
    """``expanded_idx_to_permuted_idx``: dtype and form (MAP-1)."""
    if mapped.dtype is not torch.int32:
        found.add("MAP-1", MAP, dtype_name(mapped.dtype), "int32")
    if not _has_route_shape(mapped, expectation):
        got, hint = _describe_routes(mapped, expectation)
        found.add("MAP-1", MAP, got, _routes_expected(expectation), hint)


def _has_route_shape(tensor: Tensor, expectation: Expectation) -> bool:
    """Token-major contiguous [T, K]."""
    return (
        is_readable(tensor) and tensor.shape == (expectation.num_tokens, expectation.top_k) and tensor.is_contiguous()
    )


def _routes_expected(expectation: Expectation) -> str:
    return f"contiguous token-major [T, K] = [{expectation.num_tokens}, {expectation.top_k}]"


def _describe_routes(tensor: Tensor, expectation: Expectation) -> tuple[str, str]:
    """What came in place of a [T, K] tensor, and what it usually means."""
    tokens, top_k = expectation.num_tokens, expectation.top_k
    text = shape_text(tensor)
    if not is_readable(tensor):
        return text, ""
    shape = tuple(tensor.shape)
    if shape == (tokens, top_k):
        strides = tuple(tensor.stride())
        if strides == (1, tokens):
            return (
                f"strides {strides}: a transposed view of a slot-major [K, T] buffer",
                "return .contiguous()" + ("; T == K, so the shape alone cannot tell" if tokens == top_k else ""),
            )
        return f"strides {strides}: not contiguous", "return .contiguous()"
    if shape == (tokens * top_k,):
        return f"a flat [T * K] tensor {text}", "reshape to [T, K] if slot (t, k) is at t * K + k"
    if shape == (top_k, tokens):
        return f"a slot-major [K, T] tensor {text}", "return .t().contiguous()"
    if len(shape) == 2 and shape[0] == tokens:
        return f"{text}: {shape[1]} slots per token", "K is the layer's top_k"
    return text, ""
