"""What a tail asks of one call before it communicates: no more tokens than it was opened for, and a legal output."""

from __future__ import annotations

import torch

from moe_contract.backend import TailCapacity, UnsupportedError
from moe_contract.checks import Expectation, require
from moe_contract.declarations import ConsumerDeclaration
from moe_contract.outputs import MoEOutput


def require_call(declaration: ConsumerDeclaration, capacity: TailCapacity, output: MoEOutput, num_tokens: int) -> None:
    """Returns if a tail may run on this output. Reads no data, and decides alike on ranks that are given alike.

    Raises:
        UnsupportedError: more tokens than the tail was opened for (CAP-1, DEFER-4).
        ContractViolation: the output breaks a clause that metadata alone can tell.
    """
    if num_tokens > capacity.max_tokens:
        raise UnsupportedError(f"CAP-1: {num_tokens} tokens, opened for at most {capacity.max_tokens}", clause="CAP-1")
    given = getattr(getattr(output.routed, "expert_weights", None), "dtype", capacity.dtype)
    wide = given == torch.float32 and "float32" in declaration.weights_dtypes
    expected = Expectation(
        num_tokens=num_tokens,
        top_k=capacity.top_k,
        hidden_size=capacity.hidden_size,
        dtype=capacity.dtype,
        weights_dtype=torch.float32 if wide else capacity.dtype,
        route_major=declaration.route_major,
    )
    require(output, expected, tier="metadata")
