"""What a tail costs without a fused kernel: the plain ways that the bench compares with."""

from moe_contract import Backend

from .compiled import CompiledLocal
from .triton_tails import TritonLocal, TritonSplit

triton_local = Backend(consumer=TritonLocal())
triton_split = Backend(consumer=TritonSplit())
compile_local = Backend(consumer=CompiledLocal())

__all__ = ["CompiledLocal", "TritonLocal", "TritonSplit", "compile_local", "triton_local", "triton_split"]
