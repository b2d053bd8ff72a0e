"""One rank's contribution: the top-k sum, the routed scale and the shared output, rounded as a profile says."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_contract import MoEOutput, RoundingProfile, ScalePlacement, UnfinalizedMoEOutput


def local_sum(
    output: MoEOutput,
    profile: RoundingProfile,
    scale_placement: ScalePlacement = ScalePlacement.SUM,
) -> Tensor:
    """``scale * sum_k weight_k * row_k + shared`` of this rank, ``[T, H]`` in the activation dtype.

    Its ``routed`` is a finalized tensor or any project's object with the three fields of UnfinalizedMoEOutput.
    Nothing that it holds is written; the result may be ``routed`` itself.
    """
    if profile is RoundingProfile.STEP_ROUNDED:
        return _step_rounded(output, scale_placement)
    return _rounded_once(output, scale_placement)


def _step_rounded(output: MoEOutput, scale_placement: ScalePlacement) -> Tensor:
    """Profile A: every product and every sum is rounded to the activation dtype."""
    routed, scale = output.routed, output.routed_scaling_factor
    if isinstance(routed, Tensor):
        dtype, acc = routed.dtype, routed
    else:
        dtype, acc = routed.gemm2_permuted.dtype, _zeros(routed)
        on_weights, scale = _split_scale(scale, scale_placement)
        for term in _terms(routed, on_weights):
            # The fp32 sum of two 16-bit values, rounded to 16 bits, is their correctly rounded 16-bit sum: fp32 has
            # more than twice their significand.
            acc = acc + term.to(dtype)
    if scale != 1.0:
        acc = (acc.float() * scale).to(dtype)
    return acc if output.shared_output is None else acc + output.shared_output


def _rounded_once(output: MoEOutput, scale_placement: ScalePlacement) -> Tensor:
    """Profiles B, C and D: fp32 throughout, one rounding to publish."""
    routed, scale = output.routed, output.routed_scaling_factor
    if isinstance(routed, Tensor):
        dtype, acc = routed.dtype, routed.float()
    else:
        dtype, acc = routed.gemm2_permuted.dtype, _zeros(routed).float()
        on_weights, scale = _split_scale(scale, scale_placement)
        for term in _terms(routed, on_weights):
            acc = acc + term
    acc = acc * scale
    if output.shared_output is not None:
        acc = acc + output.shared_output.float()
    return acc.to(dtype)


def _split_scale(scale: float, placement: ScalePlacement) -> tuple[float, float]:
    """The factor of each weight and the factor of the finished sum; one of the two is 1."""
    return (scale, 1.0) if placement is ScalePlacement.WEIGHTS else (1.0, scale)


def _zeros(routed: UnfinalizedMoEOutput) -> Tensor:
    rows = routed.gemm2_permuted
    return rows.new_zeros(routed.expert_weights.shape[0], rows.shape[1])


def _terms(routed: UnfinalizedMoEOutput, scale: float) -> Iterator[Tensor]:
    """``float32(row) * float32(weight) * scale`` of every slot in slot order, ``[T, H]`` each; +0 where absent.

    One slot at a time, and only the rows it names: ``gemm2_permuted`` may have more elements than fit in memory
    once more (MAP-6), and rows that no entry names may hold anything (ROWS-2).
    """
    rows = routed.gemm2_permuted
    if rows.shape[0] == 0:
        # No row exists to stand in for an absent one; every slot is absent.
        return
    for slot in range(routed.expert_weights.shape[1]):
        index = routed.expanded_idx_to_permuted_idx[:, slot].long()
        weight = routed.expert_weights[:, slot].float() * scale
        term = rows.index_select(0, index.clamp(min=0)).float() * weight[:, None]
        # Selecting, not multiplying by a mask: a NaN in the row or the weight of an absent slot must vanish (MAP-4).
        yield torch.where((index >= 0)[:, None], term, 0.0)
