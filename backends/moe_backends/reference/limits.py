"""What the reference producer refuses: declarations that it would not keep, and layers beyond its own."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch

from moe_backends.common.layer_checks import require_weights
from moe_backends.common.routing import require_routing
from moe_contract import MoELayer, ProducerDeclaration, RoutingMethod, UnsupportedError
from moe_contract.declarations import INPUT_WEIGHTED_METHODS
from moe_contract.limits import require_layer


def require_declaration(declaration: ProducerDeclaration) -> None:
    """Refuses a declaration that the reference producer would not keep; ValueError names the field."""
    name = declaration.name
    if len(declaration.weights_dtypes) != 1:
        raise ValueError(f"{name}: weights_dtypes must name one dtype, got {_names(declaration.weights_dtypes)}")
    if RoutingMethod.PRECOMPUTED in declaration.folds_scale:
        raise ValueError(f"{name}: folds_scale must not hold precomputed, whose weights are used verbatim")
    if missing := (INPUT_WEIGHTED_METHODS & declaration.routing_methods) - declaration.never_deferred:
        raise ValueError(f"{name}: never_deferred must hold {_names(missing)}, whose rows are weighted (ROWS-3)")
    if declaration.route_major and declaration.tile is not None:
        raise ValueError(f"{name}: route-major rows are not padded, so tile must be None, got {declaration.tile}")
    if declaration.quantization == "nvfp4" and INPUT_WEIGHTED_METHODS & declaration.routing_methods:
        raise ValueError(f"{name}: quantised inputs cannot be weighted, so routing_methods must not hold llama4")
    if declaration.intermediate_dtype != "float32":
        raise ValueError(f"{name}: the intermediate is float32, not {declaration.intermediate_dtype}")


def require_loadable(layer: MoELayer, declaration: ProducerDeclaration) -> None:
    """Refuses a layer at load time.

    Raises:
        ValueError: weights or routing parameters that do not fit together.
        UnsupportedError: a layer beyond the declared limits, or float32 matmuls that are not float32.
    """
    require_weights(layer)
    require_routing(layer.routing, layer.num_experts)
    require_layer(declaration, layer)
    # TF32 and bfloat16 passes keep 10 or 7 bits of the intermediate, which the declaration calls float32.
    if (precision := torch.get_float32_matmul_precision()) != "highest":
        raise UnsupportedError(
            f"{declaration.name}: needs true float32 matmuls, but torch's precision is {precision!r}; "
            "call torch.set_float32_matmul_precision('highest')"
        )


def _names(values: AbstractSet[str]) -> str:
    return ", ".join(sorted(values))
