"""The fused CUDA consumer. Importing it needs neither GPU nor compiler; opening a tail does."""

from moe_contract import Backend

from .configs import Form
from .consumer import DECLARATION, CudaConsumer, CudaTail
from .launcher import PDL, SOLO, Engine, launch, open_engine, prefill

backend = Backend(consumer=CudaConsumer())

__all__ = [
    "DECLARATION",
    "PDL",
    "SOLO",
    "CudaConsumer",
    "CudaTail",
    "Engine",
    "Form",
    "backend",
    "launch",
    "open_engine",
    "prefill",
]
