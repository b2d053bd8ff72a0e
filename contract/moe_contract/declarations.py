"""What a backend says of itself. The suite holds it to every word: an over-claim is a failure."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from moe_contract.dtypes import ActivationDtypeName, DtypeName
from moe_contract.layer import Activation, RoutingMethod
from moe_contract.places import place_of_caller
from moe_contract.plugin_errors import PlugInError, declaration_mistakes
from moe_contract.quant import QuantFormat

WeightsDtype = Literal["activation", "float32"]
"""``activation``: the routing weights have the activation dtype; ``float32``: contract 1.1."""
DeviceType = Literal["cpu", "cuda"]
Quantization = Literal["none", "nvfp4"]
"""``none``: the experts compute on the layer's own weights; ``nvfp4``: on the codes that moe_contract.quant defines."""
ALL_ROUTING_METHODS = frozenset(RoutingMethod)
INPUT_WEIGHTED_METHODS = frozenset(method for method in RoutingMethod if method.weights_input)
FOLDING_METHODS = frozenset({RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2})
"""The methods into whose weights FlashInfer's routing folds the scale (RoutingMethodType, version 0.7). They are those
that take a bias, but not for that: until 0.6.12 MINIMAX2 took one without folding."""


class RoundingProfile(StrEnum):
    """Where a consumer rounds between the rows and the residual (what NUM-1 is measured against)."""

    STEP_ROUNDED = "A"
    """Rounded to the activation dtype at each top-k term and at each rank."""
    LOCAL_FP32 = "B"
    """Local sum in fp32, one rounding to publish, then rounded at each rank, in order."""
    FP32 = "C"
    """Local sum in fp32, one rounding to publish, ranks summed in order in fp32, one rounding of the residual."""
    SWITCH = "D"
    """As FP32, but the ranks are summed in the switch in an order that is not specified."""


class ScalePlacement(StrEnum):
    """Where a consumer applies the routed scaling factor; both are within the NUM-1 bound."""

    SUM = "sum"
    """to the finished local sum."""
    WEIGHTS = "weights"
    """in fp32, to each weight."""


class Determinism(StrEnum):
    """What repeats of one call on the same inputs give (NUM-2)."""

    BITWISE = "bitwise"
    VARIES = "varies"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Declaration(_Record):
    name: str
    version: str = "0"
    emulated: bool = False
    """Stands in for hardware that is missing; never certifies the real backend."""
    devices: frozenset[DeviceType] = frozenset({"cpu", "cuda"})
    dtypes: frozenset[ActivationDtypeName] = frozenset({"bfloat16", "float16"})
    """Activation dtypes."""
    weights_dtypes: frozenset[WeightsDtype] = frozenset({"activation"})
    """Producer: the one it emits. Consumer: all that it reads."""
    determinism: Determinism = Determinism.BITWISE
    route_major: bool = False
    """Producer: emits contract 1.1's route-major rows. Consumer: accepts them."""
    graph_capturable: bool = True
    """Whether a call can be captured in a CUDA graph (GRAPH-1)."""
    compilable: bool = False
    """Whether torch.compile(fullgraph=True) traces a call at one rank (GRAPH-2)."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Most tokens in one call; None for no limit of its own."""
    max_top_k: int | None = Field(default=None, ge=1)
    """Largest K, slots of a token; None for any."""
    max_hidden_size: int | None = Field(default=None, ge=1)
    """Largest H; None for any."""
    hidden_size_multiple: int = Field(default=1, ge=1)
    """H is a multiple of this; any other is refused (CAP-1)."""
    requires: str = ""
    """What it needs beyond torch, in one phrase, for the user who cannot run it."""

    @model_validator(mode="wrap")
    @classmethod
    def _mistakes_in_one_line(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(data)
        except ValidationError as error:
            name = data.get("name") if isinstance(data, dict) else None
            message = declaration_mistakes(cls.__name__, cls.model_fields, error, name)
            raise PlugInError(place_of_caller(), message) from None


class RoutingLimit(_Record):
    """The largest layer that a producer routes with one method: kernels are compiled for a few sizes of each."""

    method: RoutingMethod
    """Which method."""
    max_experts: int = Field(ge=1)
    """Largest E of the whole layer with it."""
    max_top_k: int = Field(ge=1)
    """Largest K with it."""


class ProducerDeclaration(_Declaration):
    """What a producer says of itself."""

    can_defer: bool = True
    """False: always finalizes, whatever the config says (DEFER-3)."""
    routing_methods: frozenset[RoutingMethod] = ALL_ROUTING_METHODS
    """Methods that it routes by; any other is refused (CAP-1)."""
    folds_scale: frozenset[RoutingMethod] = frozenset()
    """Methods whose weights already contain the routed scaling factor (SCALE-1, SCALE-3)."""
    never_deferred: frozenset[RoutingMethod] = INPUT_WEIGHTED_METHODS
    """Methods for which it always finalizes, such as those that weight the expert's input (ROWS-3)."""
    deferral_multiple: int = Field(default=1, ge=1)
    """Rows of any other hidden size are padded to a multiple of this, so such a layer is always finalized (ROWS-4)."""
    routing_limits: tuple[RoutingLimit, ...] = ()
    """Methods with limits of their own, below ``max_experts`` and ``max_top_k``."""
    activations: frozenset[Activation] = frozenset(Activation)
    """Functions that it computes between the GEMMs."""
    expert_biases: bool = True
    """Whether the experts' projections may have biases."""
    max_experts: int | None = Field(default=None, ge=1)
    """Largest E of the whole layer, not of a rank's part; None for any."""
    expert_parallel: bool = True
    """Whether a rank may hold a part of the experts."""
    tile: int | None = Field(default=None, ge=1)
    """Rows of one expert are padded to a multiple of this; None when they are not padded."""
    borrowed: bool = False
    """The output is valid only until the next call (OUT-5)."""
    intermediate_dtype: DtypeName = "float32"
    """What the activation's result is rounded to before the second GEMM; float32 for no rounding."""
    quantization: Quantization = "none"
    """What weights and inputs of both GEMMs are quantised to. The codes are specification, not error (NUM-1)."""

    def folds(self, method: RoutingMethod) -> bool:
        """Whether the weights of this method already contain the scale."""
        return method in self.folds_scale

    def defers(self, method: RoutingMethod, hidden_size: int) -> bool:
        """Whether a layer of this method and width is handed over unfinalized where deferral is on."""
        return self.can_defer and method not in self.never_deferred and hidden_size % self.deferral_multiple == 0


class ConsumerDeclaration(_Declaration):
    """What a consumer says of itself."""

    profile: RoundingProfile = RoundingProfile.FP32
    scale_placement: ScalePlacement = ScalePlacement.SUM
    world_sizes: frozenset[int] | None = None
    """Rank counts it supports; None for any."""
    norm_weight_dtypes: frozenset[WeightsDtype] = frozenset({"activation", "float32"})
    quant_formats: frozenset[QuantFormat] = frozenset()
    """Quantised outputs it can write (QUANT-1)."""
    weight_bias: bool = True
    """Whether it supports the (1 + gamma) form of the norm (NORM-2)."""
    accepts_finalized: bool = True
    """Whether ``routed`` may be a finalized tensor."""
    in_place_residual: bool = False
    """Whether it overwrites the residual that it is given (OUT-4)."""
