"""What is run: one case of a tail (synthetic outputs) or of a layer (a producer, or a producer with a consumer)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from moe_contract.declarations import WeightsDtype
from moe_contract.dtypes import ActivationDtypeName
from moe_contract.layer import Activation, RoutingMethod
from moe_contract.quant import QuantFormat, ScaleLayout

Stratum = Literal["lattice", "normal", "small", "cancelling", "dominant"]
"""lattice: sums exact in every order; normal: N(0, 1); small: N(0, 0.02^2); cancelling: terms that cancel to a few
units in the last place; dominant: one large term and the others below half of its last place."""
Absent = Literal["none", "quarter", "token", "all"]
"""Which slots are -1 on each rank: none, a quarter of them at random, every slot of the last token, all."""
_SHORT_DTYPE = {"bfloat16": "bf16", "float16": "fp16"}


class Shape(BaseModel):
    """The sizes of a case. Tokens T, top-k K, hidden size H, ranks N."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(ge=0)
    top_k: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    ranks: int = Field(ge=1)
    dtype: ActivationDtypeName

    @property
    def size_id(self) -> str:
        """The sizes as the id of a case gives them."""
        return f"T{self.tokens}-K{self.top_k}-H{self.hidden_size}-N{self.ranks}-{self.short_dtype}"

    @property
    def short_dtype(self) -> str:
        """``bf16`` or ``fp16``."""
        return _SHORT_DTYPE[self.dtype]

    @property
    def features(self) -> tuple[str, ...]:
        """What is not at its default, such as ``scale=2.5``, and the sizes that only a layer has."""
        return tuple(_differences(self))

    @property
    def id(self) -> str:
        """Sizes and every feature that is not at its default; stable from release to release."""
        return "-".join([self.size_id, *self.features])


class TailCase(Shape):
    """A consumer's case: outputs made for it, with no producer."""

    stratum: Stratum = "lattice"
    weights_dtype: WeightsDtype = "activation"
    absent: Absent = "none"
    scale: float = 1.0
    """routed_scaling_factor."""
    shared: bool = False
    """Each rank hands over a partial shared output."""
    form: Literal["unfinalized", "finalized"] = "unfinalized"
    route_major: bool = False
    weight_bias: float = 0.0
    norm_weight_dtype: WeightsDtype = "activation"
    norm_weight: Literal["ones", "random"] = "ones"
    quant: QuantFormat | None = None
    scale_layout: ScaleLayout = "swizzled"
    eps: float = 1e-6
    seed: int = 0


class LayerCase(Shape):
    """A producer's case: a whole layer, sharded over the ranks."""

    intermediate_size: int = Field(ge=1)
    num_experts: int = Field(ge=1)
    stratum: Literal["lattice", "normal"] = "normal"
    method: RoutingMethod = RoutingMethod.RENORMALIZE
    activation: Activation = Activation.SILU
    num_groups: int = 1
    topk_groups: int = 1
    ep: int = 1
    """Ranks that hold different experts; divides ``ranks``."""
    scale: float = 1.0
    shared_intermediate_size: int = 0
    """0: no shared expert."""
    biases: bool = False
    skew: bool = False
    """All tokens go to the first top_k experts."""
    router_dtype: Literal["float32", "activation"] = "float32"
    precomputed_weights: WeightsDtype = "activation"
    """PRECOMPUTED only: dtype of the weights that the router outside the kernel hands over."""
    weight_bias: float = 0.0
    seed: int = 0


def kind_of(fields: Mapping[str, Any]) -> type[LayerCase] | type[TailCase]:
    """The kind of case that was written as these fields."""
    return LayerCase if "num_experts" in fields else TailCase


_SHAPE_FIELDS = frozenset(Shape.model_fields)


def _differences(case: Shape) -> list[str]:
    parts = []
    for name, field in type(case).model_fields.items():
        value: Any = getattr(case, name)
        if name in _SHAPE_FIELDS or value == field.default:
            continue
        if field.is_required():
            parts.append(f"{name.replace('_size', '').replace('num_', '')}{value}")
        elif value is True:
            parts.append(name.replace("_", "."))
        else:
            parts.append(f"{name.replace('_', '.')}={getattr(value, 'value', value)}")
    return parts
