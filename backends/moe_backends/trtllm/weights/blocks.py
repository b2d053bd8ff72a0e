"""Layouts of a whole matrix: columns in blocks of 128 bytes, and padding to the kernels' multiples.

Padded columns of the intermediate are exactly 0 (every activation of 0 is 0) and meet zero columns of down, so that
they change nothing; padded columns of the hidden size stay in the rows.
"""

from __future__ import annotations

from torch import Tensor

BLOCK_BYTES = 128
"""Bytes of one row in a column block: a line of shared memory as the tensor memory accelerator fetches it."""
INTERMEDIATE_MULTIPLE = 128
"""The kernels' check on the intermediate size."""


def to_blocks(matrix: Tensor) -> Tensor:
    """``[..., M, K]`` to ``[..., K / b, M, b]`` with b elements of 128 bytes."""
    *outer, rows, columns = matrix.shape
    width = BLOCK_BYTES // matrix.element_size()
    if columns % width:
        raise ValueError(f"blocked weights need a multiple of {width} columns, got {columns}")
    return matrix.view(*outer, rows, columns // width, width).transpose(-3, -2).contiguous()


def from_blocks(blocked: Tensor) -> Tensor:
    """The inverse of ``to_blocks``."""
    *outer, blocks, rows, width = blocked.shape
    return blocked.transpose(-3, -2).reshape(*outer, rows, blocks * width)


def write_blocks(blocked: Tensor, matrix: Tensor, places: Tensor) -> None:
    """Row i of ``matrix [E, M, K]`` to row ``places[i]`` of ``blocked [E, K' / b, M', b]``, K at most K'."""
    width = blocked.shape[-1]
    whole = matrix.shape[2] // width
    if whole:
        parts = matrix[..., : whole * width].unflatten(2, (whole, width)).transpose(1, 2)
        blocked[:, :whole].index_copy_(2, places, parts)
    if rest := matrix.shape[2] - whole * width:
        blocked[:, whole, :, :rest].index_copy_(1, places, matrix[..., whole * width :])


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below ``size``."""
    return -(-size // multiple) * multiple
