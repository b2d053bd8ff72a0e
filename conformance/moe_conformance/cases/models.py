"""The real layers that ``model:NAME`` profiles are made of (``models.toml``)."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from moe_contract import Activation, RoutingMethod

WEIGHT_BUDGET = 2**29 + 2**25
"""Elements of the experts' weights that a case may hold: 1.1 GB in 16 bits, so that a whole layer and its shards,
in two worker processes, stay below 8 GB."""
INTERMEDIATE_MULTIPLE = 16
"""A reduced intermediate size is a multiple of this, so that it can be split over up to 16 ranks."""


class Model(BaseModel):
    """One public model's MoE layer; sizes as in the contract's symbols."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    method: RoutingMethod
    num_groups: int = 1
    topk_groups: int = 1
    activation: Activation = Activation.SILU
    biases: bool = False
    scale: float = 1.0
    shared: int = 0
    """Intermediate size of the shared expert; 0 for none."""
    weight_bias: float = 0.0
    precomputed_weights: Literal["activation", "float32"] = "activation"
    tp: tuple[int, ...] = Field(min_length=1)
    """Tensor-parallel sizes it is served with."""

    @property
    def reduced_intermediate_size(self) -> int:
        """The intermediate size that a case uses: the true one, or the largest that keeps to WEIGHT_BUDGET."""
        projections = 3 if self.activation.gated else 2
        most = WEIGHT_BUDGET // (projections * self.num_experts * self.hidden_size)
        if self.intermediate_size <= most:
            return self.intermediate_size
        return max(INTERMEDIATE_MULTIPLE, most // INTERMEDIATE_MULTIPLE * INTERMEDIATE_MULTIPLE)

    @property
    def reduced_shared(self) -> int:
        """The shared expert's intermediate size, cut down in the same proportion."""
        if not self.shared or self.reduced_intermediate_size == self.intermediate_size:
            return self.shared
        ratio = self.reduced_intermediate_size / self.intermediate_size
        return max(INTERMEDIATE_MULTIPLE, int(self.shared * ratio) // INTERMEDIATE_MULTIPLE * INTERMEDIATE_MULTIPLE)


@cache
def models() -> dict[str, Model]:
    """All models by name."""
    text = files("moe_conformance.cases").joinpath("models.toml").read_text(encoding="utf-8")
    return {name: Model(name=name, **fields) for name, fields in tomllib.loads(text).items()}
