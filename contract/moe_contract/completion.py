"""The reference completion: what any holder of a pending output may call to finish it (DEFER-6).

Rounding profile C on one rank: the top-k sum in float32 in slot order, the scale on the finished sum, the shared
output, one rounding to the activation dtype. Nothing here reads a value on the host, so no call synchronises a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moe_contract.backend import RankGroup
from moe_contract.outputs import MoEOutput, PendingOutputError, UnfinalizedMoEOutput, is_unfinalized
from moe_contract.violations import ContractViolation, Violation

Completable = MoEOutput | UnfinalizedMoEOutput | Tensor
"""What can be finished: our own classes, or objects of another project with the same attributes."""


def finalize(
    routed: UnfinalizedMoEOutput | Tensor, *, routed_scaling_factor: float = 1.0, shared_output: Tensor | None = None
) -> Tensor:
    """This rank's part ``[T, H]`` in the activation dtype: scaled top-k sum plus the shared output. Not reduced.

    A finalized tensor is accepted too. Slots of -1 add exactly +0 whatever their weight holds, and rows that no map
    entry names are never read into the result (MAP-4, ROWS-2).

    Raises:
        ContractViolation: not an output of the contract, or shapes that do not belong together.
    """
    parts = _Parts(routed, shared_output, routed_scaling_factor)
    return _local_part(parts).to(_activation_dtype(parts))


def complete(output: Completable, group: RankGroup | None = None) -> Tensor:
    """Finishes any pending output: finalizes it and, where a group is given, sums it over the group's ranks.

    With a group the call is collective. A ``MoEOutput`` brings its own scale and shared output; a bare triple or
    tensor has neither.

    Raises:
        ContractViolation: not an output of the contract, or shapes that do not belong together.
    """
    parts = _take_apart(output)
    local = _local_part(parts).to(_activation_dtype(parts))
    return local if group is None else group.all_reduce(local)


def complete_expert_parallel(outputs: Sequence[Completable]) -> Tensor:
    """Finishes the outputs of all ranks of one expert-parallel group, held by one caller, in rank order.

    Summed in float32 and rounded once. Each rank's own shared part is added, as the reduction would.

    Raises:
        ValueError: no outputs.
        ContractViolation: as for ``complete``, or outputs of different shapes or dtypes.
    """
    if not outputs:
        raise ValueError("complete_expert_parallel needs the output of every rank of the group, got none")
    all_parts = [_take_apart(output) for output in outputs]
    total, dtype = _local_part(all_parts[0]), _activation_dtype(all_parts[0])
    for rank, parts in enumerate(all_parts[1:], start=1):
        local = _local_part(parts)
        if local.shape != total.shape or _activation_dtype(parts) != dtype:
            got = f"{list(local.shape)} {_activation_dtype(parts)}"
            raise _violation("OUT-1", "routed", got, f"{list(total.shape)} {dtype} as on rank 0", rank=rank)
        total = total + local
    return total.to(dtype)


def require_tensor(output: object) -> Tensor:
    """``output`` where it is a tensor; for callers that can take nothing else.

    Raises:
        PendingOutputError: a pending output, or anything else that is not a tensor.
    """
    if isinstance(output, Tensor):
        return output
    if is_unfinalized(output) or hasattr(output, "routed"):
        raise PendingOutputError(
            f"DEFER-6: expected a finalized tensor, got a pending {type(output).__name__}; finish it first with "
            "moe_contract.complete(output, group), or build the layer with reduce_results=True"
        )
    raise PendingOutputError(f"OUT-1: expected a finalized [T, H] tensor, got {type(output).__name__}")


class _Parts(NamedTuple):
    routed: UnfinalizedMoEOutput | Tensor
    shared_output: Tensor | None
    routed_scaling_factor: float


def _take_apart(output: Completable) -> _Parts:
    """A ``MoEOutput`` of whichever project in its parts; a bare triple or tensor with neither scale nor shared."""
    if isinstance(output, Tensor) or is_unfinalized(output):
        return _Parts(cast(UnfinalizedMoEOutput | Tensor, output), None, 1.0)
    if not hasattr(output, "routed"):
        raise _violation("OUT-1", "output", type(output).__name__, "MoEOutput, UnfinalizedMoEOutput or a tensor")
    scale = getattr(output, "routed_scaling_factor", 1.0)
    return _Parts(output.routed, getattr(output, "shared_output", None), scale)


def _activation_dtype(parts: _Parts) -> torch.dtype:
    return parts.routed.dtype if isinstance(parts.routed, Tensor) else parts.routed.gemm2_permuted.dtype


def _local_part(parts: _Parts) -> Tensor:
    """This rank's part in float32, before its rounding."""
    routed, shared, scale = parts
    if isinstance(routed, Tensor):
        if routed.dim() != 2:
            raise _violation("OUT-1", "routed", f"shape {list(routed.shape)}", "[T, H]")
        total = routed.float()
    else:
        total = _top_k_sum(routed)
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise _violation("OUT-1", "routed_scaling_factor", type(scale).__name__, "float")
    if scale != 1.0:
        total = total * scale
    if shared is None:
        return total
    if not isinstance(shared, Tensor) or shared.shape != total.shape:
        got = f"shape {list(shared.shape)}" if isinstance(shared, Tensor) else type(shared).__name__
        raise _violation("SHARED-1", "shared_output", got, f"a tensor of shape {list(total.shape)}")
    return total + shared.float()


def _top_k_sum(routed: UnfinalizedMoEOutput) -> Tensor:
    """Weighted sum of each token's rows in float32, slot by slot, without a copy of all rows."""
    _require_triple(routed)
    rows, weights, row_of = routed.gemm2_permuted, routed.expert_weights, routed.expanded_idx_to_permuted_idx
    num_tokens, top_k = row_of.shape
    total = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    if rows.shape[0] == 0 or num_tokens == 0:
        return total
    zero = torch.zeros((), dtype=torch.float32, device=rows.device)
    for slot in range(top_k):
        row = row_of[:, slot].long()  # 64-bit: row * H may pass 2^31 (MAP-6)
        # Absent slots read row 0 and are then replaced, not multiplied by 0: row 0 or the weight may hold NaN.
        term = rows.index_select(0, row.clamp(min=0)).float() * weights[:, slot, None].float()
        total = total + torch.where((row >= 0)[:, None], term, zero)
    return total


def _require_triple(routed: object) -> None:
    """Refuses what cannot be summed. Clause by clause checking is ``checks.check``'s work."""
    if not is_unfinalized(routed):
        raise _violation("OUT-1", "routed", type(routed).__name__, "a [T, H] tensor or an UnfinalizedMoEOutput")
    fields = {
        "gemm2_permuted": ("ROWS-1", "[P, H]"),
        "expert_weights": ("WGT-1", "[T, K]"),
        "expanded_idx_to_permuted_idx": ("MAP-1", "[T, K]"),
    }
    shapes: dict[str, torch.Size] = {}
    for field, (clause, expected) in fields.items():
        value = getattr(routed, field)
        if not isinstance(value, Tensor):
            raise _violation("OUT-1", field, type(value).__name__, f"a tensor {expected}")
        if value.dim() != 2:
            raise _violation(clause, field, f"shape {list(value.shape)}", expected)
        shapes[field] = value.shape
    weights, mapped = shapes["expert_weights"], shapes["expanded_idx_to_permuted_idx"]
    if weights != mapped:
        expected = f"the map's shape {list(mapped)}, slot for slot"
        raise _violation("WGT-1", "expert_weights", f"shape {list(weights)}", expected)


def _violation(clause: str, field: str, got: str, expected: str, rank: int | None = None) -> ContractViolation:
    return ContractViolation([Violation(clause=clause, field=field, got=got, expected=expected, rank=rank)])
