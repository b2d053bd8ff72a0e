"""The fused CUDA consumer. Importing it needs neither GPU nor compiler; opening a tail does."""

from moe_contract import Backend

from .configs import Form
from .consumer import DECLARATION, CudaConsumer, CudaTail
from .launcher import PDL, SOLO, Engine, Operands, launch, open_engine, prefill

backend = Backend(consumer=CudaConsumer())
pdl = Backend(consumer=CudaConsumer(DECLARATION.model_copy(update={"name": "cuda-pdl"}), pdl=True))
"""With programmatic dependent launch, for engines whose kernels all wait for their predecessors."""

__all__ = [
    "DECLARATION",
    "PDL",
    "SOLO",
    "CudaConsumer",
    "CudaTail",
    "Engine",
    "Form",
    "Operands",
    "backend",
    "launch",
    "open_engine",
    "pdl",
    "prefill",
]
