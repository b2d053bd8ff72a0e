"""The tail as one operator, so that torch.compile traces a call without looking inside (GRAPH-2)."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .quant import empty_quantised

if TYPE_CHECKING:
    from .consumer import CudaTail

NAMESPACE = "moe_conformance_cuda"
_tails: weakref.WeakValueDictionary[int, CudaTail] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "tail(int tail, Tensor routed, Tensor? weights, Tensor? index, Tensor? shared, Tensor residual, Tensor norm_weight,"
    " float scale, float eps, float weight_bias, int quant, float quant_arg) -> (Tensor, Tensor, Tensor, Tensor)"
)


def register(tail: CudaTail) -> int:
    """The number by which the operator finds an opened tail; it does not keep the tail alive."""
    number = next(_numbers)
    _tails[number] = tail
    return number


def _run(tail: int, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``arguments`` as the schema has them, which are those of CudaTail.run."""
    residual_out, norm_out, codes, scales = _tails[tail].run(*arguments)
    return residual_out, norm_out, _present(codes, residual_out), _present(scales, residual_out)


def _present(tensor: Tensor | None, like: Tensor) -> Tensor:
    """An operator returns tensors only, so an absent one is empty."""
    return like.new_empty(0) if tensor is None else tensor


def _fake(
    tail: int,
    routed: Tensor,
    weights: Tensor | None,
    index: Tensor | None,
    shared: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    scale: float,
    eps: float,
    weight_bias: float,
    quant: int,
    quant_arg: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    codes, scales = empty_quantised(residual, quant) if quant else (None, None)
    residual_out, norm_out = (torch.empty_like(residual, memory_format=torch.contiguous_format) for _ in range(2))
    return residual_out, norm_out, _present(codes, residual), _present(scales, residual)


_library.impl("tail", _run, "CUDA")
torch.library.register_fake(f"{NAMESPACE}::tail", _fake, lib=_library)
