"""Correct outputs on a lattice (small integers times powers of two: every sum is exact), to be spoiled by the tests."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_contract import (
    Activation,
    Expectation,
    ExpertWeights,
    MoELayer,
    MoEOutput,
    Routing,
    RoutingMethod,
    UnfinalizedMoEOutput,
    Violation,
)

T, K, H = 4, 3, 16
NUM_ROWS = 20
"""More than T * K, so that some rows are named by no map entry."""


def expectation(**changes: object) -> Expectation:
    """What ``triple()`` has to look like."""
    base = Expectation(
        num_tokens=T,
        top_k=K,
        hidden_size=H,
        dtype=torch.bfloat16,
        weights_dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    return replace(base, **changes)


def lattice(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Integers from -4 to 4."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def triple(dtype: torch.dtype = torch.bfloat16, weights_dtype: torch.dtype | None = None) -> UnfinalizedMoEOutput:
    """A correct unfinalized output: rows in shuffled order, power-of-two weights, no slot absent."""
    generator = torch.Generator().manual_seed(7)
    order = torch.randperm(NUM_ROWS, generator=generator)[: T * K]
    exponents = torch.randint(-2, 1, (T, K), generator=generator)
    return UnfinalizedMoEOutput(
        gemm2_permuted=lattice(NUM_ROWS, H, seed=1, dtype=dtype),
        expert_weights=torch.exp2(exponents.double()).to(weights_dtype or dtype),
        expanded_idx_to_permuted_idx=order.to(torch.int32).reshape(T, K),
    )


def route_major_triple() -> UnfinalizedMoEOutput:
    """A correct output of contract 1.1's route-major form."""
    rows = lattice(T * K, H, seed=2)
    identity = torch.arange(T * K, dtype=torch.int32).reshape(T, K)
    return UnfinalizedMoEOutput(rows, triple().expert_weights, identity, route_major=True)


def exact_sum(routed: UnfinalizedMoEOutput, scale: float = 1.0, shared: Tensor | None = None) -> Tensor:
    """The float64 result, element by element in plain Python: independent of the code under test."""
    rows, weights = routed.gemm2_permuted.double(), routed.expert_weights.double()
    mapped = routed.expanded_idx_to_permuted_idx
    result = torch.zeros(mapped.shape[0], rows.shape[1], dtype=torch.float64)
    for token, slots in enumerate(mapped.tolist()):
        for slot, row in enumerate(slots):
            if row != -1:
                result[token] += weights[token, slot] * rows[row]
    result *= scale
    return result if shared is None else result + shared.double()


def layered(routed: UnfinalizedMoEOutput | Tensor | None = None) -> MoEOutput:
    """A layer's output around ``routed``."""
    return MoEOutput(triple() if routed is None else routed, lattice(T, H, seed=3), 2.0)


def only(violations: list[Violation]) -> Violation:
    """The single violation; one fault must be blamed on one clause."""
    assert len(violations) == 1, [str(violation) for violation in violations]
    return violations[0]


def assert_bitwise(got: Tensor, exact: Tensor) -> None:
    """``got`` equals the exact float64 values, which its dtype must represent."""
    expected = exact.to(got.dtype)
    assert torch.equal(expected.double(), exact), "the test's own values are not exact in this dtype"
    assert torch.equal(got, expected)


@dataclass
class LonelyGroup:
    """A rank's view of ``size`` ranks that all hold the same tensor."""

    size: int = 2
    rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    timeout_s: float = 1.0
    reductions: int = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of ``size`` equal tensors."""
        self.reductions += 1
        return tensor * self.size

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order."""
        return [tensor] * self.size

    def barrier(self) -> None:
        """Nobody to wait for."""

    def peer_memory(self, num_bytes: int) -> list[Tensor]:
        """One zeroed buffer per rank."""
        return [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(self.size)]


def small_layer(
    activation: Activation = Activation.SILU,
    *,
    method: RoutingMethod = RoutingMethod.RENORMALIZE,
    scale: float = 1.0,
    biases: bool = True,
    shared: bool = True,
) -> MoELayer:
    """A layer of 4 experts on the lattice, intermediate size 8."""
    routing = Routing(method, top_k=K, routed_scaling_factor=scale)
    return MoELayer(
        hidden_size=H,
        num_experts=4,
        routing=routing,
        activation=activation,
        experts=_weights(4, activation.gated, biases, seed=10),
        shared=_weights(1, activation.gated, biases, seed=20) if shared else None,
    )


def _weights(experts: int, gated: bool, biases: bool, seed: int) -> ExpertWeights:
    intermediate = 8
    wide, narrow = (experts, intermediate, H), (experts, H, intermediate)
    return ExpertWeights(
        up=lattice(*wide, seed=seed),
        down=lattice(*narrow, seed=seed + 1),
        gate=lattice(*wide, seed=seed + 2) if gated else None,
        up_bias=lattice(experts, intermediate, seed=seed + 3) if biases else None,
        gate_bias=lattice(experts, intermediate, seed=seed + 4) if biases and gated else None,
        down_bias=lattice(experts, H, seed=seed + 5) if biases else None,
    )
