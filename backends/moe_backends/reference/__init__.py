"""Pure PyTorch producers and consumers, written to be read: the plainest backends that keep the contract."""

from moe_contract import Backend

from .consumer import PROFILE_A, PROFILE_B, PROFILE_C, ReferenceConsumer
from .producer import FOLDED, FP32_WEIGHTS, NVFP4, REFERENCE, ROUTE_MAJOR, ReferenceProducer

backend = Backend(producer=ReferenceProducer(REFERENCE), consumer=ReferenceConsumer(PROFILE_C))
route_major = Backend(producer=ReferenceProducer(ROUTE_MAJOR))
folded = Backend(producer=ReferenceProducer(FOLDED))
fp32_weights = Backend(producer=ReferenceProducer(FP32_WEIGHTS))
nvfp4 = Backend(producer=ReferenceProducer(NVFP4))
profile_a = Backend(consumer=ReferenceConsumer(PROFILE_A))
profile_b = Backend(consumer=ReferenceConsumer(PROFILE_B))

__all__ = [
    "ReferenceConsumer",
    "ReferenceProducer",
    "backend",
    "folded",
    "fp32_weights",
    "nvfp4",
    "profile_a",
    "profile_b",
    "route_major",
]
