"""What a MoE kernel hands over when it stops after its second GEMM, and what a layer returns around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

_TENSOR_ONLY_ATTRIBUTES = frozenset(
    {"shape", "dtype", "device", "view", "reshape", "to", "size", "contiguous", "ndim", "stride"}
)


class PendingOutputError(TypeError, AttributeError):
    """A pending (not finalized) MoE output was used where a finalized tensor is needed.

    Also an AttributeError, so that ``hasattr(output, "shape")`` answers False instead of raising.
    """


def _refuse(name: str, used_as: str) -> NoReturn:
    raise PendingOutputError(
        f"DEFER-6: {name} is a pending MoE output, not a tensor, but was used as one ({used_as}); "
        "finish it first with moe_contract.complete(output, group)"
    )


class _Pending:
    """Makes tensor-only code fail at the first use of a pending output with a message that says what to do."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        _refuse(cls.__name__, getattr(func, "__name__", str(func)))

    def _arithmetic(self, other: object) -> NoReturn:
        """Tensor's own operators swallow the TypeError of ``__torch_function__``, so the operators refuse as well."""
        _refuse(type(self).__name__, "an operand of + - * / @")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _arithmetic
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = _arithmetic

    def __getattr__(self, name: str) -> NoReturn:
        if name in _TENSOR_ONLY_ATTRIBUTES:
            _refuse(type(self).__name__, f".{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@dataclass
class UnfinalizedMoEOutput(_Pending):
    """The three tensors between a kernel's second GEMM and its finalizer.

    Shapes use T tokens, K top-k slots, H the logical hidden size and P permuted rows.

    Attributes:
        gemm2_permuted: ``[P, H]`` in the activation dtype; unweighted rows grouped by expert. Rows that no map
            entry names may hold anything.
        expert_weights: ``[T, K]`` routing weights, in the activation dtype unless the producer declares float32.
        expanded_idx_to_permuted_idx: ``[T, K]`` int32; the row of (token, slot), or -1 where the expert is not on
            this rank.
        route_major: contract 1.1. Row ``t * K + k`` *is* route (t, k), P is T * K, and the map is the identity
            except for -1.
    """

    gemm2_permuted: Tensor
    expert_weights: Tensor
    expanded_idx_to_permuted_idx: Tensor
    route_major: bool = False


@dataclass
class MoEOutput(_Pending):
    """What a MoE layer returns while its reduction is still to come.

    Attributes:
        routed: a finalized ``[T, H]`` tensor of this rank's routed part, or the pending triple.
        shared_output: this rank's partial shared-expert output ``[T, H]``, not reduced, not scaled; or None.
        routed_scaling_factor: the factor the finalizer still has to apply to the routed part; 1.0 where the
            producer folded it into the weights.
    """

    routed: Tensor | UnfinalizedMoEOutput
    shared_output: Tensor | None = None
    routed_scaling_factor: float = 1.0


def require_unfinalized(output: MoEOutput) -> UnfinalizedMoEOutput:
    """The triple of an output whose routed part is pending; TypeError where it is finalized."""
    if isinstance(output.routed, torch.Tensor):
        raise TypeError("expected a pending output, got a finalized tensor as its routed part")
    return output.routed


def is_unfinalized(routed: object) -> bool:
    """Whether ``routed`` carries the three tensors of the contract, whichever project's class it is."""
    return not isinstance(routed, torch.Tensor) and all(
        hasattr(routed, field) for field in ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")
    )
