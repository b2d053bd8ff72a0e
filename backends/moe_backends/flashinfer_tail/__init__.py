"""FlashInfer's fused tail as a consumer. Importing it needs neither GPU nor compiler nor FlashInfer."""

from moe_contract import Backend

from .consumer import DECLARATION, WHOLE_WARPS, FlashInferConsumer, FlashInferTail
from .launcher import Engine, fill_for_solo, launch, open_engine

backend = Backend(consumer=FlashInferConsumer(WHOLE_WARPS))
"""Installed as ``flashinfer-fused``: the hidden sizes at which the kernel keeps the contract."""
as_shipped = Backend(consumer=FlashInferConsumer())
"""``moe_backends.flashinfer_tail:as_shipped``: every hidden size that FlashInfer itself lets through."""

__all__ = [
    "DECLARATION",
    "WHOLE_WARPS",
    "Engine",
    "FlashInferConsumer",
    "FlashInferTail",
    "as_shipped",
    "backend",
    "fill_for_solo",
    "launch",
    "open_engine",
]
