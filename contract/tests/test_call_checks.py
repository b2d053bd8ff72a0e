"""What a tail asks of one call: tokens within the capacity, and an output that metadata alone does not refute."""

from __future__ import annotations

import pytest
import torch

from moe_contract import ConsumerDeclaration, ContractViolation, MoEOutput, TailCapacity, UnsupportedError
from moe_contract.call_checks import require_call

from .lattice import H, K, T, triple

DECLARED = ConsumerDeclaration(name="c")


def test_tokens_are_refused_one_past_the_capacity() -> None:
    """At the capacity a call runs; past it the refusal says its clause."""
    output = MoEOutput(triple())
    require_call(DECLARED, TailCapacity(T, H, K, torch.bfloat16), output, T)
    with pytest.raises(UnsupportedError, match=f"^CAP-1: {T} tokens, opened for at most {T - 1}$") as caught:
        require_call(DECLARED, TailCapacity(T - 1, H, K, torch.bfloat16), output, T)
    assert caught.value.clause == "CAP-1"


def test_output_of_another_width_is_a_violation() -> None:
    """The output is held to the capacity that the tail was opened for."""
    with pytest.raises(ContractViolation, match="ROWS-4"):
        require_call(DECLARED, TailCapacity(T, 2 * H, K, torch.bfloat16), MoEOutput(triple()), T)
