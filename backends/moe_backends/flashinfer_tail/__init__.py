"""FlashInfer's fused tail as a consumer. Importing it needs neither GPU nor compiler nor FlashInfer."""

from moe_contract import Backend

from .consumer import DECLARATION, WHOLE_WARPS, FlashInferConsumer, FlashInferTail
from .launcher import Engine, fill_for_solo, launch, open_engine

backend = Backend(consumer=FlashInferConsumer())

__all__ = [
    "DECLARATION",
    "WHOLE_WARPS",
    "Engine",
    "FlashInferConsumer",
    "FlashInferTail",
    "backend",
    "fill_for_solo",
    "launch",
    "open_engine",
]
