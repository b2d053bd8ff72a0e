"""The MoE output contract: the objects, the clauses, the protocols and the checks. Imports torch and pydantic only."""

from moe_contract.backend import (
    Backend,
    Consumer,
    LoadedProducer,
    PeerTimeoutError,
    Producer,
    RankGroup,
    Tail,
    TailCapacity,
    TailOutput,
    UnsupportedError,
)
from moe_contract.config import MoEConfig
from moe_contract.declarations import (
    ConsumerDeclaration,
    Determinism,
    ProducerDeclaration,
    RoundingProfile,
    ScalePlacement,
)
from moe_contract.decorators import consumer, producer
from moe_contract.layer import Activation, ExpertWeights, MoELayer, PrecomputedRouting, Routing, RoutingMethod
from moe_contract.outputs import MoEOutput, PendingOutputError, UnfinalizedMoEOutput, is_unfinalized
from moe_contract.quant import QuantFormat, QuantRecipe
from moe_contract.violations import ContractViolation, Violation

CONTRACT_VERSION = "1.1"

__all__ = [
    "CONTRACT_VERSION",
    "Activation",
    "Backend",
    "Consumer",
    "ConsumerDeclaration",
    "ContractViolation",
    "Determinism",
    "ExpertWeights",
    "LoadedProducer",
    "MoEConfig",
    "MoELayer",
    "MoEOutput",
    "PeerTimeoutError",
    "PendingOutputError",
    "PrecomputedRouting",
    "Producer",
    "ProducerDeclaration",
    "QuantFormat",
    "QuantRecipe",
    "RankGroup",
    "RoundingProfile",
    "Routing",
    "RoutingMethod",
    "ScalePlacement",
    "Tail",
    "TailCapacity",
    "TailOutput",
    "UnfinalizedMoEOutput",
    "UnsupportedError",
    "Violation",
    "consumer",
    "is_unfinalized",
    "producer",
]
