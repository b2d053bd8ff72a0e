"""Rows, weights and sums of the reference producer, exact on the lattice, whole and sharded."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moe_contract import Activation, ExpertWeights, PrecomputedRouting, Routing, RoutingMethod
from moe_contract.completion import finalize

from .reference_producer_layers import (
    HIDDEN,
    NUM_EXPERTS,
    TOP_K,
    VARIANTS,
    deferred,
    finalized,
    ids_of,
    lattice_batch,
    lattice_layer,
    looped_rows,
)

FP32_UNIT = 2.0**-24


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("biases", [False, True])
def test_rows_weights_and_map_are_the_layers(variant: str, dtype: torch.dtype, biases: bool) -> None:
    """Each route's row is its expert's unweighted output, down bias included once, and its weight the router's."""
    layer = lattice_layer(dtype=dtype, biases=biases)
    hidden, logits = lattice_batch(17, dtype=dtype)
    output = deferred(layer, hidden, logits, variant)
    ids = ids_of(logits)
    rows = output.gemm2_permuted[output.expanded_idx_to_permuted_idx.long()]
    assert rows.dtype == dtype
    assert torch.equal(rows.double(), looped_rows(layer, hidden, ids))
    assert output.expert_weights.dtype == (torch.float32 if variant == "fp32_weights" else dtype)
    assert torch.equal(output.expert_weights.double(), logits.double().gather(1, ids))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_finalized_form_is_the_finalized_triple(variant: str) -> None:
    """Completing a deferred output gives the bits of the same kernel's finalized output (DEFER-5)."""
    layer = lattice_layer(routing=Routing(RoutingMethod.DEEPSEEK_V3, 3, routed_scaling_factor=2.5))
    hidden, _ = lattice_batch(17)
    logits = torch.randn(17, NUM_EXPERTS, generator=torch.Generator().manual_seed(2))
    assert torch.equal(finalize(deferred(layer, hidden, logits, variant)), finalized(layer, hidden, logits, variant))


def test_finalized_form_is_the_weighted_sum() -> None:
    """On the lattice the finalized output is the exact sum of weight times row."""
    layer = lattice_layer(biases=True)
    hidden, logits = lattice_batch(33)
    ids = ids_of(logits)
    exact = (looped_rows(layer, hidden, ids) * logits.double().gather(1, ids)[..., None]).sum(1)
    assert torch.equal(finalized(layer, hidden, logits).double(), exact)


@pytest.mark.parametrize("activation", [a for a in Activation if a.gated])
@pytest.mark.parametrize("biases", [False, True])
def test_gated_rows_are_within_the_derived_bound(activation: Activation, biases: bool) -> None:
    """Gated experts stay within the error that float32 accumulation and one rounding allow."""
    layer = lattice_layer(activation=activation, biases=biases, dtype=torch.bfloat16)
    hidden, logits = lattice_batch(17)
    output = deferred(layer, hidden, logits)
    ids = ids_of(logits)
    for token, slot in torch.cartesian_prod(torch.arange(17), torch.arange(TOP_K)).tolist():
        got = output.gemm2_permuted[output.expanded_idx_to_permuted_idx[token, slot].long()].double()
        want, bound = gated_row(layer.experts, int(ids[token, slot]), hidden[token].double(), activation)
        assert ((got - want).abs() <= bound).all()


def gated_row(weights: ExpertWeights, expert: int, x: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """One row in float64, and its bound. FC1 is exact on the lattice, so only what follows it rounds."""

    def bias(of: Tensor | None) -> Tensor | float:
        return 0.0 if of is None else of[expert].double()

    assert weights.gate is not None
    gate = weights.gate[expert].double() @ x + bias(weights.gate_bias)
    up = weights.up[expert].double() @ x + bias(weights.up_bias)
    if activation is Activation.SILU:
        middle = gate / (1 + torch.exp(-gate)) * up
    elif activation is Activation.GELU_TANH:
        middle = gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) / 2 * up
    else:
        middle = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    down = weights.down[expert].double()
    row = down @ middle + bias(weights.down_bias)
    # At most 32 roundings up to the middle: exp or tanh to 2 ulp of arguments of at most 3 (or 1 + tanh near -3, which
    # cancels at most the factor that |gate| bounds), then one FMA per term, the bias, and the store to bfloat16.
    scale = down.abs() @ torch.maximum(middle.abs(), (gate * up).abs()) + (0.0 if weights.down_bias is None else 1.0)
    error = (32 + middle.numel() + 1) * FP32_UNIT * scale
    return row, error + 2.0**-8 * (row.abs() + error)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("tp_size", [2, 4])
def test_tensor_parallel_parts_sum_to_the_whole(variant: str, tp_size: int) -> None:
    """Finalized outputs of all intermediate-size shards add up to the whole layer, bit for bit."""
    layer = lattice_layer(biases=True)
    hidden, logits = lattice_batch(17)
    parts = [finalized(layer.shard(rank, tp_size), hidden, logits, variant) for rank in range(tp_size)]
    assert torch.equal(torch.stack(parts).float().sum(0), finalized(layer, hidden, logits, variant).float())


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("ep_size", [2, 4, 8])
def test_every_slot_is_on_exactly_one_expert_parallel_rank(variant: str, ep_size: int) -> None:
    """A (token, slot) is valid on one rank and -1 on the others, weights agree, and the parts sum to the whole."""
    layer = lattice_layer(biases=True)
    hidden, logits = lattice_batch(17)
    outputs = [deferred(layer.shard(0, 1, rank, ep_size), hidden, logits, variant) for rank in range(ep_size)]
    present = torch.stack([output.expanded_idx_to_permuted_idx >= 0 for output in outputs])
    assert (present.sum(0) == 1).all()
    assert all(torch.equal(output.expert_weights, outputs[0].expert_weights) for output in outputs)
    total = torch.stack([finalize(output).float() for output in outputs]).sum(0)
    assert torch.equal(total, finalized(layer, hidden, logits, variant).float())


def test_mixed_parallel_parts_sum_to_the_whole() -> None:
    """Two-way expert and two-way tensor parallelism together still add up, biases included."""
    layer = lattice_layer(biases=True)
    hidden, logits = lattice_batch(17)
    parts = [finalized(layer.shard(tp, 2, ep, 2), hidden, logits) for ep in range(2) for tp in range(2)]
    assert torch.equal(torch.stack(parts).float().sum(0), finalized(layer, hidden, logits).float())


@pytest.mark.parametrize("method", [m for m in RoutingMethod if m is not RoutingMethod.PRECOMPUTED])
def test_scale_is_folded_for_the_declared_methods_only(method: RoutingMethod) -> None:
    """The folded variant scales the weights of DEEPSEEK_V3 and MINIMAX2; the plain one scales none."""
    top_k = 1 if method is RoutingMethod.LLAMA4 else TOP_K
    hidden, _ = lattice_batch(5)
    logits = torch.randn(5, NUM_EXPERTS, generator=torch.Generator().manual_seed(2))
    results = {}
    for variant in ("backend", "folded"):
        for factor in (1.0, 2.0):
            layer = lattice_layer(routing=Routing(method, top_k, routed_scaling_factor=factor))
            results[variant, factor] = finalized(layer, hidden, logits, variant)
    folds = method in (RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2)
    assert torch.equal(results["backend", 1.0], results["backend", 2.0])
    # Doubling is exact, so a folded factor of 2 doubles every bit pattern of the result.
    assert torch.equal(results["folded", 2.0], results["folded", 1.0] * (2 if folds else 1))
    assert results["folded", 1.0].any()


def test_precomputed_weights_are_never_scaled() -> None:
    """With precomputed routing the given weights reach the output unchanged, whatever the factor."""
    layer = lattice_layer(routing=Routing(RoutingMethod.PRECOMPUTED, TOP_K, routed_scaling_factor=2.5))
    hidden, logits = lattice_batch(5)
    ids = ids_of(logits)
    given = PrecomputedRouting(ids.int(), torch.rand(5, TOP_K, generator=torch.Generator().manual_seed(2)))
    assert torch.equal(deferred(layer, hidden, given, "folded").expert_weights, given.weights.bfloat16())
    assert torch.equal(deferred(layer, hidden, given, "fp32_weights").expert_weights, given.weights)


def test_negative_precomputed_id_is_a_slot_without_an_expert() -> None:
    """A slot that the router left empty is -1 in the map and adds nothing."""
    layer = lattice_layer(routing=Routing(RoutingMethod.PRECOMPUTED, TOP_K))
    hidden, _ = lattice_batch(2)
    given = PrecomputedRouting(torch.tensor([[3, -1], [-1, -1]], dtype=torch.int32), torch.ones(2, TOP_K))
    assert (deferred(layer, hidden, given).expanded_idx_to_permuted_idx < 0).tolist() == [[False, True], [True, True]]
    assert torch.equal(finalized(layer, hidden, given)[1], torch.zeros(HIDDEN, dtype=torch.bfloat16))


def test_llama4_weights_the_input_and_not_the_output() -> None:
    """LLAMA4's sigmoid weight multiplies the expert's input once; a squared ReLU tells the two places apart."""
    layer = lattice_layer(routing=Routing(RoutingMethod.LLAMA4, 1))
    hidden, _ = lattice_batch(9)
    logits = torch.full((9, NUM_EXPERTS), -1.0)
    logits[torch.arange(9), torch.arange(9) % NUM_EXPERTS] = 0.0  # sigmoid 0.5, exact
    exact = looped_rows(layer, hidden, ids_of(logits, 1), factor=0.5)[:, 0]
    assert torch.equal(finalized(layer, hidden, logits).double(), exact)
    assert exact.any()
