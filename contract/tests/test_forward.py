"""A layer's forward pass: the scale is stated once, the shared part is this rank's, both routes agree."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_contract import (
    Activation,
    MoEConfig,
    MoEForward,
    MoELayer,
    MoEOutput,
    PrecomputedRouting,
    Producer,
    RoutingMethod,
    apply_activation,
    complete,
    producer,
    shared_expert_output,
)

from .lattice import H, K, LonelyGroup, T, lattice, small_layer, triple

DEFERRING = MoEConfig(defer_moe_finalize=True, tp_size=2)


def fixed_producer(**declared: object) -> Producer:
    """Hands over the same triple whatever it is given."""

    @producer(name="fixed", **declared)
    def run(layer: MoELayer, config: MoEConfig, hidden_states: Tensor, router_logits: object) -> object:
        return triple()

    return run


def precomputed() -> PrecomputedRouting:
    """Routing from outside the kernel."""
    return PrecomputedRouting(torch.zeros(T, K, dtype=torch.int32), torch.ones(T, K, dtype=torch.bfloat16))


def test_both_routes_give_the_same_bits() -> None:
    """Reducing itself, or handing over for another to complete, is one computation."""
    layer, x, logits = small_layer(scale=2.5), lattice(T, H, seed=40), lattice(T, 4)
    pending = MoEForward(fixed_producer(), layer, DEFERRING)(x, logits)
    finished = MoEForward(fixed_producer(), layer, DEFERRING, LonelyGroup(), reduce_results=True)(x, logits)
    assert isinstance(pending, MoEOutput) and isinstance(finished, Tensor)
    assert torch.equal(complete(pending, LonelyGroup()), finished)


def test_layer_that_reduces_needs_its_group() -> None:
    """Without a group the sum over ranks would silently be missing; one rank needs none."""
    with pytest.raises(ValueError, match=r"tp_size 2 needs a RankGroup.*RED-1"):
        MoEForward(fixed_producer(), small_layer(), DEFERRING, reduce_results=True)
    alone = MoEForward(fixed_producer(), small_layer(), MoEConfig(), reduce_results=True)
    assert isinstance(alone(lattice(T, H), lattice(T, 4)), Tensor)


@pytest.mark.parametrize(
    ("method", "folding", "outside", "expected"),
    [
        (RoutingMethod.DEEPSEEK_V3, False, False, 2.5),
        (RoutingMethod.DEEPSEEK_V3, True, False, 1.0),
        (RoutingMethod.DEEPSEEK_V3, True, True, 2.5),
        (RoutingMethod.PRECOMPUTED, True, True, 2.5),
        (RoutingMethod.RENORMALIZE, True, False, 2.5),
    ],
)
def test_remaining_scale_is_what_the_producer_did_not_fold(
    method: RoutingMethod, folding: bool, outside: bool, expected: float
) -> None:
    """Folded methods leave 1.0; weights from outside the kernel are never folded, whatever is declared."""
    folds = {RoutingMethod.DEEPSEEK_V3, RoutingMethod.PRECOMPUTED} if folding else set()
    forward = MoEForward(fixed_producer(folds_scale=folds), small_layer(method=method, scale=2.5), DEFERRING)
    output = forward(lattice(T, H), precomputed() if outside else lattice(T, 4))
    assert isinstance(output, MoEOutput)
    assert output.routed_scaling_factor == expected


def exact_mlp(layer: MoELayer, x: Tensor) -> Tensor:
    """The shared expert in float64; exact on the lattice for activations that are."""
    shared = layer.shared
    assert shared is not None and shared.up_bias is not None and shared.down_bias is not None
    up = x.double() @ shared.up[0].double().T + shared.up_bias[0].double()
    return up.relu().square() @ shared.down[0].double().T + shared.down_bias[0].double()


def test_shared_expert_is_exact_where_its_activation_is() -> None:
    """relu squared on the lattice: the float32 MLP has no rounding but the last."""
    layer, x = small_layer(Activation.RELU2), lattice(T, H, seed=41)
    result = shared_expert_output(layer, x)
    assert result is not None
    assert torch.equal(result, exact_mlp(layer, x).to(torch.bfloat16))


def test_shared_parts_of_the_ranks_add_up() -> None:
    """Each rank's partial has its columns alone, and one rank the bias: the exact sum is the whole."""
    layer, x = small_layer(Activation.RELU2), lattice(T, H, seed=42)
    parts = [layer.shard(0, 2, ep_rank, 2) for ep_rank in range(2)] + [layer.shard(1, 2, r, 2) for r in range(2)]
    total = torch.zeros(T, H, dtype=torch.float64)
    for part in parts:
        assert part.shared is not None and part.shared.up_bias is not None
        exact = x.double() @ part.shared.up[0].double().T + part.shared.up_bias[0].double()
        exact = exact.relu().square() @ part.shared.down[0].double().T
        if part.shared.down_bias is not None:
            exact = exact + part.shared.down_bias[0].double()
        result = shared_expert_output(part, x)
        assert result is not None and torch.equal(result, exact.to(torch.bfloat16))
        total += exact
    assert torch.equal(total, exact_mlp(layer, x))


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("biases", [True, False])
def test_shared_expert_takes_every_activation(activation: Activation, biases: bool) -> None:
    """Gated or not, with biases or without: [T, H] in the activation dtype."""
    result = shared_expert_output(small_layer(activation, biases=biases), lattice(T, H))
    assert result is not None and result.shape == (T, H) and result.dtype == torch.bfloat16
    assert bool(result.isfinite().all()) and bool((result != 0).any())


def test_layer_without_shared_expert_has_no_shared_output() -> None:
    """None, not zeros: nothing is added."""
    output = MoEForward(fixed_producer(), small_layer(shared=False), DEFERRING)(lattice(T, H), lattice(T, 4))
    assert isinstance(output, MoEOutput) and output.shared_output is None


def by_definition(activation: Activation, gate: float, up: float) -> float:
    """Each activation as its docstring says, in Python floats."""
    if activation is Activation.RELU2:
        return max(up, 0.0) ** 2
    if activation is Activation.SILU:
        return gate / (1 + math.exp(-gate)) * up
    if activation is Activation.GELU_TANH:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return 0.5 * gate * (1 + math.tanh(inner)) * up
    g, u = min(gate, 7.0), max(-7.0, min(7.0, up))
    return g / (1 + math.exp(-1.702 * g)) * (u + 1)


@pytest.mark.parametrize("activation", list(Activation))
def test_activation_is_its_definition(activation: Activation) -> None:
    """In float64 every activation is its formula to a few roundings, clamps and signs included."""
    values = [-9.0, -7.0, -1.5, 0.0, 0.5, 3.0, 7.0, 12.0]
    gates, ups = torch.tensor(values, dtype=torch.float64), torch.tensor(values[::-1], dtype=torch.float64)
    result = apply_activation(activation, gates if activation.gated else None, ups)
    assert result.dtype == torch.float64
    for gate, up, got in zip(values, values[::-1], result.tolist(), strict=True):
        expected = by_definition(activation, gate, up)
        # 16 roundings in either formula, the exponential's argument amplified by at most |1.702 * 9| < 16.
        # 1 + tanh cancels towards -9, where only an absolute error of a few units of |gate * up| is left.
        assert abs(got - expected) <= 256 * 2.0**-53 * max(abs(expected), abs(gate * up))


def test_activation_refuses_a_gate_too_many_or_too_few() -> None:
    """A missing gate is not taken for an activation without one."""
    with pytest.raises(ValueError, match="activation silu takes a gate projection, got none"):
        apply_activation(Activation.SILU, None, torch.ones(1))
    with pytest.raises(ValueError, match="activation relu2 takes no gate projection, got one"):
        apply_activation(Activation.RELU2, torch.ones(1), torch.ones(1))
