"""One rule for declared limits: what exceeds them, by which clause, in which words."""

from __future__ import annotations

from typing import Any

import pytest

from moe_contract import ConsumerDeclaration, ProducerDeclaration, RoutingMethod, UnsupportedError
from moe_contract.limits import Request, beyond, require_tokens

ASKED: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "top_k": 8, "hidden_size": 2048}


def request(**fields: Any) -> Request:
    """A request within every default declaration, but for what the test changes."""
    return Request(**(ASKED | fields))


def test_every_limit_is_named_with_its_clause() -> None:
    """The machine by CAP-2, anything else by CAP-1."""
    declared = ConsumerDeclaration(
        name="c", devices=frozenset({"cuda"}), world_sizes=frozenset({2}), max_tokens=4, max_top_k=7,
        max_hidden_size=1024, hidden_size_multiple=768,
    )  # fmt: skip
    assert [str(each) for each in beyond(declared, request(ranks=3, tokens=5, weights_dtype="float32"))] == [
        "CAP-1: 3 ranks are not among its world_sizes (2)",
        "CAP-2: cpu is not among its devices (cuda)",
        "CAP-1: weights dtype float32 is not among its weights_dtypes (activation)",
        "CAP-1: max_tokens is 4, got 5",
        "CAP-1: max_top_k is 7, got 8",
        "CAP-1: max_hidden_size is 1024, got 2048",
        "CAP-1: hidden size must be a multiple of 768, got 2048",
    ]


def test_what_is_not_asked_is_not_exceeded() -> None:
    """Fields left at None, and those that only the other side declares."""
    consumer = ConsumerDeclaration(name="c", world_sizes=frozenset({2}), max_tokens=1)
    producer = ProducerDeclaration(name="p", max_tokens=1, max_experts=1, expert_biases=False, activations=frozenset())
    asked = request(method=RoutingMethod.TOPK)
    assert [*beyond(consumer, asked), *beyond(producer, asked)] == []
    assert list(beyond(producer, request(ranks=3))) == []


@pytest.mark.parametrize("field", ["expert_biases", "expert_parallel"])
def test_a_layer_with_what_is_declared_unsupported_is_beyond(field: str) -> None:
    """Biases and expert parallelism are declared with a yes or no."""
    differences: dict[str, Any] = {field: False}
    (found,) = beyond(ProducerDeclaration(name="p", **differences), request(**{field: True}))
    assert found.clause == "CAP-1" and "declared unsupported" in found.reason
    assert list(beyond(ProducerDeclaration(name="p"), request(**{field: True}))) == []


def test_tokens_are_refused_one_past_the_limit() -> None:
    """With the backend's name, in one line, by clause."""
    declared = ProducerDeclaration(name="p", max_tokens=5)
    require_tokens(declared, 5)
    with pytest.raises(UnsupportedError, match=r"^p: CAP-1: max_tokens is 5, got 6$") as caught:
        require_tokens(declared, 6)
    assert caught.value.clause == "CAP-1"
