"""The MoE output contract: the objects, the clauses, the protocols and the checks. Imports torch and pydantic only."""

from moe_contract.activations import apply_activation
from moe_contract.backend import (
    Backend,
    Consumer,
    Gated,
    Installation,
    Installed,
    LoadedProducer,
    PeerTimeoutError,
    Producer,
    RankGroup,
    SoloConsumer,
    Tail,
    TailCapacity,
    TailOutput,
    UnsupportedError,
)
from moe_contract.checks import Expectation, check, check_expert_parallel_group, require
from moe_contract.clauses import Clause, UnknownClauseError, get_clause
from moe_contract.completion import complete, complete_expert_parallel, finalize, require_tensor
from moe_contract.config import MoEConfig
from moe_contract.declarations import (
    ConsumerDeclaration,
    Determinism,
    ProducerDeclaration,
    RoundingProfile,
    ScalePlacement,
)
from moe_contract.decorators import consumer, producer
from moe_contract.forward import MoEForward
from moe_contract.layer import Activation, ExpertWeights, MoELayer, PrecomputedRouting, Routing, RoutingMethod
from moe_contract.negotiation import Negotiation, negotiate
from moe_contract.outputs import MoEOutput, PendingOutputError, UnfinalizedMoEOutput, is_unfinalized
from moe_contract.plugin_errors import PlugInError
from moe_contract.quant import QuantFormat, QuantRecipe
from moe_contract.shared_expert import shared_expert_output
from moe_contract.violations import ContractViolation, Violation

CONTRACT_VERSION = "1.1"

__all__ = [
    "CONTRACT_VERSION",
    "Activation",
    "Backend",
    "Clause",
    "Consumer",
    "ConsumerDeclaration",
    "ContractViolation",
    "Determinism",
    "Expectation",
    "ExpertWeights",
    "Gated",
    "Installation",
    "Installed",
    "LoadedProducer",
    "MoEConfig",
    "MoEForward",
    "MoELayer",
    "MoEOutput",
    "Negotiation",
    "PeerTimeoutError",
    "PendingOutputError",
    "PlugInError",
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
    "SoloConsumer",
    "Tail",
    "TailCapacity",
    "TailOutput",
    "UnfinalizedMoEOutput",
    "UnknownClauseError",
    "UnsupportedError",
    "Violation",
    "apply_activation",
    "check",
    "check_expert_parallel_group",
    "complete",
    "complete_expert_parallel",
    "consumer",
    "finalize",
    "get_clause",
    "is_unfinalized",
    "negotiate",
    "producer",
    "require",
    "require_tensor",
    "shared_expert_output",
]
