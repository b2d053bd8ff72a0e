"""When the reference producer defers, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_backends import reference
from moe_backends.reference.producer import REFERENCE, ReferenceProducer, declare
from moe_contract import (
    Activation,
    MoEConfig,
    PrecomputedRouting,
    Routing,
    RoutingMethod,
    UnsupportedError,
    is_unfinalized,
)

from .reference_producer_layers import DEFERRING, HIDDEN, NUM_EXPERTS, lattice_batch, lattice_layer

PRODUCER = ReferenceProducer(REFERENCE)


@pytest.mark.parametrize(
    ("flag", "tp_size", "cap", "num_tokens", "defers"),
    [
        (True, 2, None, 1, True),
        (True, 2, None, 40, True),
        (False, 2, None, 5, False),
        (True, 1, None, 5, False),
        (True, 2, None, 0, False),
        (True, 2, 5, 5, True),
        (True, 2, 5, 6, False),
        (True, 2, 0, 1, False),
    ],
)
def test_defers_only_when_all_conditions_hold(
    flag: bool, tp_size: int, cap: int | None, num_tokens: int, defers: bool
) -> None:
    """Opted in, more than one rank, tokens present and within the cap; finalized [T, H] otherwise (DEFER-1)."""
    config = MoEConfig(defer_moe_finalize=flag, tp_size=tp_size, max_deferred_tokens=cap)
    output = PRODUCER.load(lattice_layer(), config)(*lattice_batch(num_tokens))
    assert is_unfinalized(output) == defers
    if not defers:
        assert isinstance(output, Tensor)
        assert output.shape == (num_tokens, HIDDEN)
        assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("config", [DEFERRING, MoEConfig()])
def test_no_tokens_give_the_finalized_empty_tensor(config: MoEConfig) -> None:
    """T = 0 gives [0, H], never the triple (OUT-2)."""
    for backend in (reference.backend, reference.route_major, reference.folded, reference.fp32_weights):
        assert backend.producer is not None
        output = backend.producer.load(lattice_layer(), config)(*lattice_batch(0))
        assert isinstance(output, Tensor)
        assert output.shape == (0, HIDDEN)


def test_flag_is_read_at_the_call() -> None:
    """Set after loading it takes effect, cleared it stops (DEFER-2)."""
    config = MoEConfig(tp_size=2)
    loaded = PRODUCER.load(lattice_layer(), config)
    batch = lattice_batch(5)
    assert not is_unfinalized(loaded(*batch))
    config.defer_moe_finalize = True
    assert is_unfinalized(loaded(*batch))
    config.defer_moe_finalize = False
    assert not is_unfinalized(loaded(*batch))


def test_llama4_never_defers() -> None:
    """Rows that carry their weight from the input on are not unweighted, so LLAMA4 finalizes (ROWS-3, DEFER-3)."""
    layer = lattice_layer(routing=Routing(RoutingMethod.LLAMA4, 1))
    assert isinstance(PRODUCER.load(layer, DEFERRING)(*lattice_batch(5)), Tensor)


def test_a_producer_that_cannot_defer_finalizes() -> None:
    """can_defer=False ignores the flag (DEFER-3)."""
    producer = ReferenceProducer(declare("never", can_defer=False))
    assert isinstance(producer.load(lattice_layer(), DEFERRING)(*lattice_batch(5)), Tensor)


@pytest.mark.parametrize(("multiple", "defers"), [(HIDDEN, True), (2 * HIDDEN, False)])
def test_a_width_off_the_declared_multiple_is_finalized(multiple: int, defers: bool) -> None:
    """deferral_multiple is kept as declared, as by a kernel that pads its rows (DEFER-3, ROWS-4)."""
    producer = ReferenceProducer(declare("padding", deferral_multiple=multiple))
    assert is_unfinalized(producer.load(lattice_layer(), DEFERRING)(*lattice_batch(5))) == defers


def test_inputs_that_do_not_fit_are_refused_with_got_and_expected() -> None:
    """Width, dtype, logits width and token counts are each named."""
    loaded = PRODUCER.load(lattice_layer(), DEFERRING)
    hidden, logits = lattice_batch(5)
    ids = torch.zeros(5, 2, dtype=torch.int32)
    wrong = [
        (hidden[:, :-1], logits, r"hidden_states: expected \[T, 16\] bfloat16 on cpu, got \[5, 15\]"),
        (hidden[0], logits, r"got \[16\]"),
        (hidden.half(), logits, "got .* float16"),
        (hidden, logits[:, :-1], r"router_logits: expected \[5, 8\] .*got \[5, 7\]"),
        (hidden, logits[:4], r"router_logits: expected \[5, 8\] .*got \[4, 8\]"),
        (hidden, PrecomputedRouting(ids, ids.float()), r"topk expects router logits \[T, E\], got PrecomputedRouting"),
    ]
    for states, router, message in wrong:
        with pytest.raises(ValueError, match=message):
            loaded(states, router)


def test_precomputed_inputs_that_do_not_fit_are_refused() -> None:
    """Logits in place of ids, a wrong shape, and an id past the last expert are named, the id with its place."""
    loaded = PRODUCER.load(lattice_layer(routing=Routing(RoutingMethod.PRECOMPUTED, 2)), DEFERRING)
    hidden, logits = lattice_batch(5)
    ids = torch.zeros(5, 2, dtype=torch.int32)
    past = ids.clone()
    past[3, 1] = NUM_EXPERTS
    wrong: list[tuple[Tensor | PrecomputedRouting, str]] = [
        (logits, "precomputed expects PrecomputedRouting"),
        (PrecomputedRouting(ids[:4], ids[:4].float()), r"precomputed ids: expected \[5, 2\] .*got \[4, 2\]"),
        (PrecomputedRouting(past, ids.float()), "num_experts 8, got 8 at token 3, slot 1"),
    ]
    for router, message in wrong:
        with pytest.raises(ValueError, match=message):
            loaded(hidden, router)


def test_layers_that_do_not_fit_are_refused_at_load() -> None:
    """Weights of other shapes or dtypes, a missing gate and impossible routing never reach a call."""
    layer = lattice_layer(activation=Activation.SILU, biases=True)
    experts = layer.experts
    assert experts.down_bias is not None
    wrong = [
        (replace(layer, hidden_size=32), r"experts.up: expected \[E, I, 32\]"),
        (replace(layer, experts=replace(experts, down=experts.up)), r"experts.down: expected \[8, 16, 4\]"),
        (replace(layer, experts=replace(experts, down_bias=experts.down_bias.float())), "experts.down_bias: .*float32"),
        (replace(layer, experts=replace(experts, gate=None)), "experts.gate: expected a tensor for silu"),
        (replace(layer, first_expert=1), "holds 1..8, which is not within the layer's 8"),
        (replace(layer, routing=Routing(RoutingMethod.TOPK, 9)), "top_k must be in"),
    ]
    for candidate, message in wrong:
        with pytest.raises(ValueError, match=message):
            PRODUCER.load(candidate, DEFERRING)


@pytest.mark.parametrize(
    ("differences", "message"),
    [
        ({"max_top_k": 1}, "max_top_k is 1, got 2"),
        ({"max_hidden_size": 15}, "max_hidden_size is 15, got 16"),
        ({"max_experts": 7}, "max_experts is 7, got 8"),
        ({"hidden_size_multiple": 32}, "multiple of 32, got 16"),
        ({"dtypes": {"float16"}}, "bfloat16 is not among its dtypes"),
        ({"devices": {"cuda"}}, "cpu is not among its devices"),
        ({"activations": {"silu"}}, "relu2 is not among its activations"),
        ({"routing_methods": {"default"}}, "topk is not among its routing_methods"),
        ({"expert_biases": False}, "expert biases are declared unsupported"),
        ({"expert_parallel": False}, "expert parallelism is declared unsupported"),
    ],
)
def test_declared_limits_are_kept(differences: dict[str, object], message: str) -> None:
    """One past a declared limit is refused with the limit, never computed (CAP-1)."""
    layer = lattice_layer(biases=True).shard(0, 1, 0, 2)
    PRODUCER.load(layer, DEFERRING)
    with pytest.raises(UnsupportedError, match=message):
        ReferenceProducer(declare("narrow", **differences)).load(layer, DEFERRING)


def test_token_limit_is_kept_at_the_call() -> None:
    """max_tokens works at the limit and refuses one past it."""
    loaded = ReferenceProducer(declare("narrow", max_tokens=5)).load(lattice_layer(), DEFERRING)
    assert is_unfinalized(loaded(*lattice_batch(5)))
    with pytest.raises(UnsupportedError, match=r"^narrow: CAP-1: max_tokens is 5, got 6$"):
        loaded(*lattice_batch(6))


@pytest.mark.parametrize(
    ("differences", "message"),
    [
        ({"weights_dtypes": {"activation", "float32"}}, "must name one dtype"),
        ({"folds_scale": {"precomputed"}}, "folds_scale must not hold precomputed"),
        ({"never_deferred": set()}, "never_deferred must hold llama4"),
        ({"route_major": True}, "tile must be None, got 8"),
        ({"intermediate_dtype": "bfloat16"}, "the intermediate is float32"),
    ],
)
def test_declarations_it_would_not_keep_are_refused(differences: dict[str, object], message: str) -> None:
    """The reference producer does not accept a declaration that would be an over-claim."""
    with pytest.raises(ValueError, match=message):
        ReferenceProducer(declare("wrong", **differences))


def test_reduced_float32_precision_is_refused() -> None:
    """A process that lets matmuls use less than float32 is told so at load."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(UnsupportedError, match="needs true float32 matmuls"):
            PRODUCER.load(lattice_layer(), DEFERRING)
    finally:
        torch.set_float32_matmul_precision(before)


def test_variants_are_exported_under_their_names() -> None:
    """The objects that the entry points name exist and declare what their names say."""
    names = {
        backend.producer.declaration.name: backend.producer.declaration
        for backend in (reference.backend, reference.route_major, reference.folded, reference.fp32_weights)
        if backend.producer is not None
    }
    assert sorted(names) == ["reference", "reference-folded", "reference-fp32-weights", "reference-route-major"]
    assert names["reference-route-major"].route_major
    assert names["reference-fp32-weights"].weights_dtypes == {"float32"}
    assert names["reference-folded"].folds_scale == {RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2}
    assert not names["reference"].folds_scale
