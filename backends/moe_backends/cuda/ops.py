"""The tail as one operator, so that torch.compile traces a call without looking inside (GRAPH-2)."""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .launcher import empty_quantised

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


def _outputs(residual: Tensor, quant: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unwritten outputs; an operator returns tensors only, so absent ones are empty."""
    codes, scales = empty_quantised(residual, quant) if quant else (residual.new_empty(0), residual.new_empty(0))
    return torch.empty_like(residual), torch.empty_like(residual), codes, scales


def _run(
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
    results = _tails[tail].run(
        routed, weights, index, shared, residual, norm_weight, scale, eps, weight_bias, quant, quant_arg
    )
    absent = () if quant else (residual.new_empty(0), residual.new_empty(0))
    return (*results[: 4 - len(absent)], *absent)


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
    return _outputs(residual, quant)


_library.impl("tail", _run, "CUDA")
torch.library.register_fake(f"{NAMESPACE}::tail", _fake, lib=_library)
