"""TRTLLM producers through flashinfer.fused_moe, and an emulator of the entry points where the hardware is missing.

Importing it needs neither FlashInfer nor a GPU.
"""

from moe_contract import Backend

from .calls import Bf16Format, Nvfp4Format
from .declare import declare_bf16, declare_nvfp4
from .emulator import Emulator
from .entry_points import EntryPoints, FlashInfer
from .producer import LoadedTrtllm, TrtllmProducer
from .returns import ReturnFormError
from .versions import Version


def bf16_producer(entry_points: EntryPoints | None = None, *, emulated: bool = False) -> TrtllmProducer:
    """``trtllm_bf16_moe`` and its routed form, through the installed FlashInfer unless told otherwise."""
    entry_points = entry_points or FlashInfer()
    return TrtllmProducer(declare_bf16(entry_points.version, emulated=emulated), entry_points, Bf16Format())


def nvfp4_producer(entry_points: EntryPoints | None = None, *, emulated: bool = False) -> TrtllmProducer:
    """``trtllm_fp4_block_scale_moe`` and its routed form, through the installed FlashInfer unless told otherwise."""
    entry_points = entry_points or FlashInfer()
    return TrtllmProducer(declare_nvfp4(entry_points.version, emulated=emulated), entry_points, Nvfp4Format())


def bf16_router_outside(entry_points: EntryPoints | None = None, *, emulated: bool = False) -> TrtllmProducer:
    """The modular form with ids and float32 weights as two tensors."""
    entry_points = entry_points or FlashInfer()
    declaration = declare_bf16(entry_points.version, emulated=emulated, router_outside=True)
    return TrtllmProducer(declaration, entry_points, Bf16Format(), precomputed="separate")


bf16 = Backend(producer=bf16_producer())
bf16_emulated = Backend(producer=bf16_producer(Emulator(), emulated=True))
bf16_modular_emulated = Backend(producer=bf16_router_outside(Emulator(), emulated=True))
nvfp4 = Backend(producer=nvfp4_producer())
nvfp4_emulated = Backend(producer=nvfp4_producer(Emulator(), emulated=True))

__all__ = [
    "Emulator",
    "EntryPoints",
    "FlashInfer",
    "LoadedTrtllm",
    "ReturnFormError",
    "TrtllmProducer",
    "Version",
    "bf16",
    "bf16_emulated",
    "bf16_modular_emulated",
    "bf16_producer",
    "bf16_router_outside",
    "nvfp4",
    "nvfp4_emulated",
    "nvfp4_producer",
]
