"""What the entry points return, by version: the one place that turns it into a tensor or the contract's triple.

Three things vary: a finalized result is a bare tensor or a list of one; the map is flat; and in some versions the
weights' buffer is labelled float32 while the kernel wrote bfloat16 into its first half. Nothing is guessed: a form that
is not in the table is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from moe_contract import UnfinalizedMoEOutput

from .versions import Version, known


class Entry(StrEnum):
    """The entry points of ``flashinfer.fused_moe`` that the adapters call."""

    BF16 = "trtllm_bf16_moe"
    BF16_ROUTED = "trtllm_bf16_routed_moe"
    FP4 = "trtllm_fp4_block_scale_moe"
    FP4_ROUTED = "trtllm_fp4_block_scale_routed_moe"

    @property
    def routed(self) -> bool:
        """Whether it is given ids and weights instead of logits."""
        return self in (Entry.BF16_ROUTED, Entry.FP4_ROUTED)

    @property
    def fp4(self) -> bool:
        """Whether it computes in NVFP4."""
        return self in (Entry.FP4, Entry.FP4_ROUTED)


class RoutingInput(StrEnum):
    """How a call is told its routing; it decides who owns the weights' buffer that comes back."""

    LOGITS = "logits"
    PACKED = "packed"
    """One int32 for each route: the id in the high half, the bits of a bfloat16 weight in the low half."""
    SEPARATE = "separate"
    """Ids and weights as two tensors; the caller's own weights come back."""


class ReturnFormError(RuntimeError):
    """A return form that is not known for this version and entry point."""


@dataclass(frozen=True)
class Window:
    """Versions ``first`` to ``last`` in which a weights buffer with float32 logits is labelled float32."""

    first: Version
    last: Version

    def holds(self, version: Version) -> bool:
        """Whether ``version`` lies in the window."""
        return self.first <= version <= self.last


BF16_MISLABELLED = Window(Version(0, 6, 8, pre=0), Version(0, 6, 15).with_posts)
"""The launcher allocated with the logits' dtype: right in 0.6.7, wrong to 0.6.15, right from 0.6.16 (read in each)."""
FP4_MISLABELLED = Window(Version(0, 2, 14), Version(0, 6, 14).with_posts)
"""flashinfer#3595: allocated with the logits' dtype; fixed by #3644, in 0.6.15."""


@dataclass(frozen=True)
class EntryCall:
    """What was called and with what, as far as it decides what comes back. T tokens, K ``top_k``."""

    version: Version
    entry: Entry
    routing: RoutingInput
    num_tokens: int
    top_k: int
    logits_dtype: torch.dtype | None = None
    given_weights_dtype: torch.dtype | None = None
    """SEPARATE only."""

    def __str__(self) -> str:
        return f"flashinfer {self.version} {self.entry.value} ({self.routing.value})"


def mislabelled(call: EntryCall) -> bool:
    """Whether the weights come back as bfloat16 bytes in a tensor that says float32."""
    if call.routing is not RoutingInput.LOGITS or call.logits_dtype is not torch.float32:
        return False
    return (FP4_MISLABELLED if call.entry.fp4 else BF16_MISLABELLED).holds(call.version)


def finalized(result: object, call: EntryCall) -> Tensor:
    """The tensor of a call with ``do_finalize=True``, whether bare or in a list or tuple of one.

    All three are taken whatever the version: they cannot be mistaken for one another, and FlashInfer announces that the
    bare tensors become lists in 0.8.

    Raises:
        ReturnFormError: an unknown version, several tensors, or no tensor.
    """
    _require_known(call)
    if isinstance(result, Tensor):
        return result
    if isinstance(result, list | tuple) and len(result) == 1 and isinstance(result[0], Tensor):
        return result[0]
    raise _unknown(call, result, "a tensor, or a list or tuple of one, as do_finalize=True gives")


def unfinalized(result: object, call: EntryCall) -> UnfinalizedMoEOutput:
    """The contract's triple of a call with ``do_finalize=False``; the map gets two dimensions without a copy.

    Raises:
        ReturnFormError: anything but three tensors, a map that is not int32 or whose size is not T * K, or weights
            whose label is not known to be right or wrong for this version.
    """
    _require_known(call)
    if not isinstance(result, list | tuple) or len(result) != 3 or not all(isinstance(each, Tensor) for each in result):
        raise _unknown(call, result, "three tensors (rows, weights, map), as do_finalize=False gives")
    rows, weights, index = result
    if rows.dim() != 2 or rows.dtype is not torch.bfloat16:
        raise ReturnFormError(f"{call}: expected rows [P, H] bfloat16, got {_described(rows)}")
    by_slot = _map(index, call)  # first: its error says what a wrong number of slots is
    return UnfinalizedMoEOutput(rows, _weights(weights, call), by_slot)


def _map(index: Tensor, call: EntryCall) -> Tensor:
    shape = (call.num_tokens, call.top_k)
    if index.dtype is not torch.int32:
        raise ReturnFormError(f"{call}: expected an int32 map, got {_described(index)}")
    if index.numel() != call.num_tokens * call.top_k:
        raise ReturnFormError(
            f"{call}: expected a map of {call.num_tokens} x {call.top_k} = {call.num_tokens * call.top_k} entries, got "
            f"{index.numel()}: fused shared experts or another top_k; not reshaped, since slots would move (MAP-1)"
        )
    if index.dim() not in (1, 2) or (index.dim() == 2 and tuple(index.shape) != shape):
        raise ReturnFormError(f"{call}: expected a flat map or one of {list(shape)}, got {_described(index)}")
    if not index.is_contiguous():
        raise ReturnFormError(f"{call}: expected a contiguous map, got strides {list(index.stride())}")
    return index.view(shape)


def _weights(weights: Tensor, call: EntryCall) -> Tensor:
    count = call.num_tokens * call.top_k
    if tuple(weights.shape) != (call.num_tokens, call.top_k):
        expected = f"weights [{call.num_tokens}, {call.top_k}]"
        raise ReturnFormError(f"{call}: expected {expected}, got {_described(weights)} (fused shared experts?)")
    expected_dtype = call.given_weights_dtype if call.routing is RoutingInput.SEPARATE else torch.bfloat16
    if weights.dtype is expected_dtype:
        return weights
    if mislabelled(call) and weights.dtype is torch.float32:
        return weights.view(torch.bfloat16).flatten()[:count].view(call.num_tokens, call.top_k)
    raise ReturnFormError(
        f"{call}: expected weights in {expected_dtype}, got {weights.dtype}; this version is not known to label "
        "them so, and reading them as they are labelled could give other numbers (WGT-3)"
    )


def _require_known(call: EntryCall) -> None:
    if not known(call.version):
        raise ReturnFormError(f"{call}: this version's return forms are not known here; see docs/trtllm.md")


def _unknown(call: EntryCall, result: object, expected: str) -> ReturnFormError:
    return ReturnFormError(f"{call}: expected {expected}, got {_described(result)}")


def _described(result: object) -> str:
    if isinstance(result, Tensor):
        return f"a tensor {list(result.shape)} {str(result.dtype).removeprefix('torch.')}"
    if isinstance(result, Sequence) and not isinstance(result, str):
        return f"a {type(result).__name__} of {len(result)}: {', '.join(type(each).__name__ for each in result)}"
    return f"a {type(result).__name__}"
