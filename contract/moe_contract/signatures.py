"""Whether a plug-in's function takes the call that it will be given, checked before it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moe_contract.places import place_of_callable
from moe_contract.plugin_errors import PlugInError


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call, by the names that the protocols give them."""

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"({', '.join([*self.positional, *(f'{name}=...' for name in self.keywords)])})"


LOAD = Arguments(("layer", "config"))
RUN = Arguments(("hidden_states", "router_logits"))
PRODUCE = Arguments(LOAD.positional + RUN.positional)
"""What the function of ``@producer`` is given."""
OPEN = Arguments(("group", "capacity"))
TAIL = Arguments(("output", "residual", "norm_weight"), ("eps", "weight_bias", "quant"))
FINISH = Arguments(("group", *TAIL.positional), ("eps", "weight_bias"))
"""What the function of ``@consumer`` is given without a quantised output."""
FINISH_QUANTISED = Arguments(FINISH.positional, (*FINISH.keywords, "quant"))
CLOSE = Arguments()


def require_takes(function: Callable[..., Any], call: Arguments, what: str = "") -> None:
    """Raises PlugInError where ``function`` cannot be called so. ``what``: its name in the message."""
    if not callable(function):
        raise PlugInError("", f"{what or 'expected a function'}: got a {type(function).__name__}, expected a callable")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled code may have none; it is judged by calling it
        return
    try:
        signature.bind(*call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        name = what or getattr(function, "__name__", type(function).__name__)
        message = f"{name} is called with {call}, but takes {_parameters(signature)}: {error}"
        raise PlugInError(place_of_callable(function), message) from None


def _parameters(signature: inspect.Signature) -> str:
    """The parameters without annotations and default values, which make a line long."""
    plain = [
        parameter.replace(
            annotation=inspect.Parameter.empty,
            default=inspect.Parameter.empty if parameter.default is inspect.Parameter.empty else ...,
        )
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty)).replace(
        "Ellipsis", "..."
    )
