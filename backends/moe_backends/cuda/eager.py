"""The short way of an eager call: one like a call that was checked before goes to the library without a detour.

A call's checks cost more than its launch, and a server repeats few calls, so a tail remembers those that passed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_contract import MoEOutput, QuantRecipe, UnfinalizedMoEOutput

from .launcher import Engine
from .quant import empty_quantised, quant_code

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # private to torch: where a version has none, the same comparison is made in Python
    TensorGuards = None  # type: ignore[assignment, misc]

ALIGNMENT = 16
"""Bytes of one vector access."""
MOST_SIZES = 4096
"""Token counts of which a tail remembers calls: those of a server's batches; what comes after is checked each time."""
MOST_KINDS = 8
"""Different calls of one token count that are remembered: layers with and without quantised output, and a few more."""
Results = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Residual, norm, and the quantised output with its scales where one is asked for."""


class Known(NamedTuple):
    """A call that passed its checks: what the next has to have in common with it, and what follows from that."""

    same: Callable[..., bool]
    """Of the tensors in the order of ``_tensors``."""
    recipe: QuantRecipe | None
    scale: float
    route_major: bool
    tokens: int
    device_index: int
    weights_fp32: bool
    norm_fp32: bool
    quant: int
    """From quant.quant_code, as is quant_arg."""
    quant_arg: float


class Memory:
    """The calls that one tail has checked."""

    def __init__(self) -> None:
        """Empty."""
        self._kinds: dict[int, list[Known]] = {}

    def find(self, output: MoEOutput, residual: Tensor, norm_weight: Tensor, quant: QuantRecipe | None) -> Known | None:
        """The checked call that this one is like in everything that checks look at; None for one to check in full."""
        if type(output) is not MoEOutput or type(routed := output.routed) is not UnfinalizedMoEOutput:
            return None
        if type(scale := output.routed_scaling_factor) is not float:
            return None  # a tensor would be equal to a number, at the price of a synchronisation
        try:
            kinds = self._kinds.get(residual.shape[0], ())
            for known in kinds:
                if (
                    known.recipe == quant
                    and known.scale == scale
                    and known.route_major == routed.route_major
                    and known.same(*_tensors(output, routed, residual, norm_weight))
                ):
                    return known
        except (AttributeError, IndexError, TypeError):  # no tensor, or no matrix: the full checks say what it is
            return None
        return None

    def keep(self, output: MoEOutput, residual: Tensor, norm_weight: Tensor, quant: QuantRecipe | None) -> None:
        """Remembers a call that passed its checks, unless it is of a kind that is prepared each time: foreign objects,
        finalized tensors, strides."""
        if type(output) is not MoEOutput or type(routed := output.routed) is not UnfinalizedMoEOutput:
            return
        tokens, given = residual.shape[0], _tensors(output, routed, residual, norm_weight)
        kinds = self._kinds.get(tokens, [])
        full = len(kinds) >= MOST_KINDS or (not kinds and len(self._kinds) >= MOST_SIZES)
        if full or not all(tensor.is_contiguous() for tensor in given if tensor is not None):
            return
        fp32 = routed.expert_weights.dtype == torch.float32, norm_weight.dtype == torch.float32
        self._kinds[tokens] = [
            *kinds,
            Known(guard_of(*given), quant, output.routed_scaling_factor, routed.route_major, tokens,
                  residual.get_device(), *fp32, *quant_code(quant)),
        ]  # fmt: skip


def _tensors(output: MoEOutput, routed: UnfinalizedMoEOutput, residual: Tensor, norm_weight: Tensor) -> tuple[Any, ...]:
    return (
        routed.gemm2_permuted, routed.expert_weights, routed.expanded_idx_to_permuted_idx, residual, norm_weight,
        output.shared_output,
    )  # fmt: skip


def guard_of(*examples: Tensor | None) -> Callable[..., bool]:
    """Whether as many tensors are each like the example in type, dtype, device, shape, strides and requires_grad; None
    where the example is None. No example is kept alive."""
    present = [tensor for tensor in examples if tensor is not None]
    if TensorGuards is None:
        facts = tuple(map(_facts, examples))
        return lambda *given: tuple(map(_facts, given)) == facts
    sizes: list[Any] = [list(each.shape) for each in present]
    strides: list[Any] = [list(each.stride()) for each in present]
    check: Callable[..., bool] = TensorGuards(*present, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if len(present) == len(examples):
        return check
    absent = [place for place, tensor in enumerate(examples) if tensor is None]
    if absent != [len(examples) - 1]:
        raise ValueError(f"only the last example may be None, got None at {absent}")
    return lambda *given: given[-1] is None and check(*given[:-1])


def _facts(tensor: Tensor | None) -> tuple[object, ...] | None:
    if tensor is None:
        return None
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride(), tensor.requires_grad


def launch_known(
    engine: Engine, known: Known, output: MoEOutput, residual: Tensor, norm_weight: Tensor, eps: float, bias: float,
    flags: int,
) -> Results | None:  # fmt: skip
    """Allocates the outputs and launches on the current stream, as launcher.launch would; ``bias``: weight_bias.

    Returns None, with nothing done, where a tensor's base is not aligned, so that it has to be copied first.
    """
    routed: Any = output.routed
    shared = output.shared_output
    rows, own = routed.gemm2_permuted.data_ptr(), 0 if shared is None else shared.data_ptr()
    added, gamma = residual.data_ptr(), norm_weight.data_ptr()
    if (rows | own | added | gamma) % ALIGNMENT:
        return None
    residual_out, norm_out = torch.empty_like(residual), torch.empty_like(residual)
    codes, scales = empty_quantised(residual, known.quant) if known.quant else (None, None)
    engine.library.run(
        engine.handle, -1, known.tokens, rows,
        routed.expert_weights.data_ptr(), routed.expanded_idx_to_permuted_idx.data_ptr(),
        own, added, gamma, residual_out.data_ptr(), norm_out.data_ptr(),
        0 if codes is None else codes.data_ptr(), 0 if scales is None else scales.data_ptr(),
        known.quant, flags, known.weights_fp32, known.norm_fp32, known.scale, eps, bias,
        known.quant_arg, torch._C._cuda_getCurrentRawStream(known.device_index),
    )  # fmt: skip
    return residual_out, norm_out, codes, scales
