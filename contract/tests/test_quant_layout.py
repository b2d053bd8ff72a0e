"""The swizzled block scale layout: every scale has one byte, and it is the documented one."""

from __future__ import annotations

import pytest

from moe_contract.quant import (
    FP4_MAX,
    FP8_MAX,
    FP8_TOKEN_MIN_SCALE,
    NVFP4_BLOCK,
    swizzled_scale_offset,
    swizzled_scale_shape,
)


@pytest.mark.parametrize(("tokens", "hidden"), [(1, 16), (128, 64), (129, 256), (300, 1024), (257, 2880)])
def test_swizzled_offset_is_a_bijection(tokens: int, hidden: int) -> None:
    """The padded rows and columns fill the buffer without a gap or a double."""
    rows, columns = swizzled_scale_shape(tokens, hidden)
    assert rows % 128 == 0 and columns % 4 == 0
    assert tokens <= rows < tokens + 128 and hidden / NVFP4_BLOCK <= columns < hidden / NVFP4_BLOCK + 4
    offsets = sorted(swizzled_scale_offset(row, block, columns) for row in range(rows) for block in range(columns))
    assert offsets == list(range(rows * columns))


@pytest.mark.parametrize(
    ("row", "block", "columns", "offset"),
    [
        (0, 0, 8, 0),
        (0, 1, 8, 1),
        (1, 0, 8, 16),
        (31, 3, 8, 499),
        (32, 0, 8, 4),
        (127, 3, 8, 511),
        (0, 4, 8, 512),
        (128, 0, 8, 1024),
        (128, 0, 16, 2048),
    ],
)
def test_swizzled_offset_at_corners(row: int, block: int, columns: int, offset: int) -> None:
    """Worked by hand: 4 blocks side by side, 32 rows of 16 bytes, 4 groups of rows, tiles of 512 bytes in row order."""
    assert swizzled_scale_offset(row, block, columns) == offset


def test_no_token_needs_no_scale() -> None:
    """T = 0 pads to nothing."""
    assert swizzled_scale_shape(0, 1024) == (0, 64)


def test_constants_are_the_formats_own() -> None:
    """The largest values, from exponents and mantissas; the floor of a per-token scale is positive and tiny."""
    assert FP8_MAX == 2.0**8 * (1 + 6 / 8) and FP4_MAX == 2.0**2 * 1.5
    assert 0 < FP8_TOKEN_MIN_SCALE * FP8_MAX == 1 / 512
