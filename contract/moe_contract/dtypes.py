"""The dtypes of the contract by name, so that declarations and reports stay plain text."""

from __future__ import annotations

from typing import Literal

import torch

DtypeName = Literal["bfloat16", "float16", "float32"]
ActivationDtypeName = Literal["bfloat16", "float16"]

_BY_NAME: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype called ``name``; ValueError names the known ones."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise ValueError(f"unknown dtype {name!r}: expected one of {', '.join(_BY_NAME)}") from None


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
