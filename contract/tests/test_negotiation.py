"""Deferral is negotiated from both declarations, and every refusal says why (DEFER-4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_contract import ConsumerDeclaration, MoEConfig, Negotiation, ProducerDeclaration, RoutingMethod, negotiate


def ask(producer: dict[str, Any] | None = None, consumer: dict[str, Any] | None = None, **setting: Any) -> Negotiation:
    """A negotiation that succeeds but for what the test changes."""
    call: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "top_k": 8,
        "hidden_size": 2048,
        "max_tokens": 256,
        "tp_size": 4,
        "device": "cuda:1",
        "routing_method": RoutingMethod.RENORMALIZE,
    }
    return negotiate(
        ProducerDeclaration(name="p", **(producer or {})),
        ConsumerDeclaration(name="c", **(consumer or {})),
        **(call | setting),
    )


def test_willing_pair_defers_up_to_what_was_asked() -> None:
    """Nothing against it: deferred, no reasons, the engine's own token limit."""
    assert ask() == Negotiation(deferred=True, reasons=(), max_tokens=256)


@pytest.mark.parametrize(
    ("producer", "consumer", "setting", "reason"),
    [
        ({"can_defer": False}, {}, {}, "producer p always finalizes (can_defer is False)"),
        ({}, {}, {"routing_method": RoutingMethod.LLAMA4}, "producer p always finalizes routing method llama4"),
        (
            {"routing_methods": {RoutingMethod.TOPK}},
            {},
            {},
            "producer p: renormalize is not among its routing_methods (topk)",
        ),
        ({"expert_parallel": False}, {}, {"ep_size": 2}, "producer p: expert parallelism is declared unsupported"),
        ({"devices": {"cpu"}}, {}, {}, "producer p: cuda is not among its devices (cpu)"),
        ({}, {"devices": {"cuda"}}, {"device": torch.device("cpu")}, "consumer c: cpu is not among its devices (cuda)"),
        ({}, {"dtypes": {"float16"}}, {}, "consumer c: bfloat16 is not among its dtypes (float16)"),
        (
            {},
            {"weights_dtypes": {"activation", "float32"}},
            {"weights_dtype": torch.float32},
            "producer p: weights dtype float32 is not among its weights_dtypes (activation)",
        ),
        (
            {"weights_dtypes": {"float32"}},
            {},
            {},
            "consumer c: weights dtype float32 is not among its weights_dtypes (activation)",
        ),
        ({}, {"max_top_k": 7}, {}, "consumer c: max_top_k is 7, got 8"),
        ({"max_hidden_size": 2047}, {}, {}, "producer p: max_hidden_size is 2047, got 2048"),
        ({}, {"hidden_size_multiple": 768}, {}, "consumer c: hidden size must be a multiple of 768, got 2048"),
        ({"max_experts": 255}, {}, {"num_experts": 256}, "producer p: max_experts is 255, got 256"),
        (
            {"routing_limits": ({"method": "renormalize", "max_experts": 256, "max_top_k": 4},)},
            {},
            {},
            "producer p: routing_limits of renormalize are 256 experts and top_k 4, got top_k 8",
        ),
        (
            {"routing_limits": ({"method": "renormalize", "max_experts": 255, "max_top_k": 8},)},
            {},
            {"num_experts": 256},
            "producer p: routing_limits of renormalize are 255 experts and top_k 8, got 256 experts and top_k 8",
        ),
        ({}, {}, {"tp_size": 1}, "tp_size is 1: there is no reduction to fuse the finalize with"),
        ({}, {"world_sizes": {8, 2}}, {}, "consumer c: 4 ranks are not among its world_sizes (2, 8)"),
        ({"route_major": True}, {}, {}, "producer p emits route-major rows, which consumer c does not accept"),
        ({}, {}, {"max_tokens": 0}, "max_tokens is 0: no call is small enough to defer"),
    ],
)
def test_refusal_names_its_single_reason(
    producer: dict[str, Any], consumer: dict[str, Any], setting: dict[str, Any], reason: str
) -> None:
    """One obstacle, one line, and no token may be deferred."""
    answer = ask(producer, consumer, **setting)
    assert not answer.deferred and answer.max_tokens == 0
    (given,) = answer.reasons
    assert given.startswith(reason) and "\n" not in given


def test_weights_dtype_that_the_contract_lacks_is_refused_by_both() -> None:
    """float16 weights beside bfloat16 activations are neither of the two."""
    assert len(ask(weights_dtype=torch.float16).reasons) == 2


def test_every_reason_is_given_at_once() -> None:
    """An integrator sees all obstacles in one answer."""
    answer = ask({"can_defer": False, "max_top_k": 4}, {"world_sizes": {2}, "max_top_k": 4})
    assert len(answer.reasons) == 4


@pytest.mark.parametrize(
    ("producer", "consumer", "setting"),
    [
        ({"max_top_k": 8, "max_hidden_size": 2048, "hidden_size_multiple": 2048}, {"world_sizes": {4}}, {}),
        ({"weights_dtypes": {"float32"}}, {"weights_dtypes": {"activation", "float32"}}, {}),
        ({}, {"weights_dtypes": {"activation", "float32"}, "route_major": True}, {"weights_dtype": torch.bfloat16}),
        ({"route_major": True}, {"route_major": True}, {}),
        (
            {
                "max_experts": 256,
                "routing_limits": (
                    {"method": "renormalize", "max_experts": 256, "max_top_k": 8},
                    {"method": "topk", "max_experts": 1, "max_top_k": 1},
                ),
            },
            {},
            {"num_experts": 256},
        ),
        ({"max_experts": 1}, {}, {}),
        ({"can_defer": True}, {"accepts_finalized": False}, {"dtype": torch.float16}),
    ],
)
def test_limit_itself_is_accepted(producer: dict[str, Any], consumer: dict[str, Any], setting: dict[str, Any]) -> None:
    """At each limit, and with each option that both sides have, deferral goes ahead."""
    assert ask(producer, consumer, **setting).reasons == ()


@pytest.mark.parametrize(("producer", "consumer", "cap"), [(None, 64, 64), (32, 64, 32), (1024, None, 256)])
def test_token_limits_lower_the_cap(producer: int | None, consumer: int | None, cap: int) -> None:
    """The smallest of the three limits; larger calls are finalized, deferral as such goes ahead."""
    answer = ask({"max_tokens": producer}, {"max_tokens": consumer})
    assert answer == Negotiation(True, (), cap)


def test_answer_becomes_the_producers_config() -> None:
    """The config defers exactly the calls that were agreed on."""
    config = ask(consumer={"max_tokens": 64}).config(tp_size=4, ep_size=2)
    assert config == MoEConfig(defer_moe_finalize=True, tp_size=4, ep_size=2, max_deferred_tokens=64)
    assert config.should_defer(64) and not config.should_defer(65)
    refused = ask({"can_defer": False}).config(tp_size=4)
    assert not refused.use_deferred_moe_finalize and not refused.should_defer(1)
