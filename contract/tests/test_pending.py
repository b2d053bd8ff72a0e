"""A pending output used as a tensor fails at its first use, and says what to do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import fields

import pytest
import torch

from moe_contract import MoEOutput, PendingOutputError, UnfinalizedMoEOutput, is_unfinalized

from .lattice import H, T, lattice, layered, triple

USES: dict[str, Callable[[object], object]] = {
    "shape": lambda output: output.shape,
    "dtype": lambda output: output.dtype,
    "view": lambda output: output.view(-1),
    "function": lambda output: torch.relu(output),
    "left operand": lambda output: output + lattice(T, H),
    "right operand": lambda output: lattice(T, H) + output,
    "right factor": lambda output: lattice(T, H) * output,
    "matmul": lambda output: lattice(H, T) @ output,
    "argument": lambda output: torch.add(lattice(T, H), output),
    "in a list": lambda output: torch.cat([lattice(T, H), output]),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("output", [triple(), layered()], ids=["triple", "layered"])
def test_use_as_a_tensor_is_refused_with_the_way_out(use: Callable[[object], object], output: object) -> None:
    """Attributes, operators and torch functions all answer with DEFER-6 and moe_contract.complete."""
    with pytest.raises(PendingOutputError, match=r"DEFER-6: .*moe_contract\.complete\(output, group\)"):
        use(output)


def test_probing_code_gets_an_honest_answer() -> None:
    """hasattr says no, and other missing attributes are ordinary AttributeErrors."""
    assert not hasattr(triple(), "shape") and getattr(layered(), "dtype", None) is None
    with pytest.raises(AttributeError, match="no attribute 'hidden'"):
        _ = triple().hidden


def test_fields_are_exactly_the_published_ones() -> None:
    """Names, order and defaults: others build these objects by position."""
    assert [field.name for field in fields(UnfinalizedMoEOutput)] == [
        "gemm2_permuted",
        "expert_weights",
        "expanded_idx_to_permuted_idx",
        "route_major",
    ]
    assert [field.name for field in fields(MoEOutput)] == ["routed", "shared_output", "routed_scaling_factor"]
    plain = MoEOutput(triple())
    assert (plain.shared_output, plain.routed_scaling_factor, triple().route_major) == (None, 1.0, False)


def test_pending_output_can_be_copied_and_sent() -> None:
    """Attribute guards do not get in the way of copy and pickle (pipeline edges)."""
    for duplicate in (copy.deepcopy(layered()), pickle.loads(pickle.dumps(layered()))):
        assert torch.equal(duplicate.routed.gemm2_permuted, triple().gemm2_permuted)


def test_tensor_is_not_unfinalized() -> None:
    """Nor is a wrapper, or an object with two of the three fields."""
    assert is_unfinalized(triple())
    assert not any(is_unfinalized(other) for other in (lattice(T, H), layered(), None, object()))
