"""OUT: the forms of an output, empty batches, devices, aliasing and lifetime."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.cases.tail_data import TailInputs, map_routed
from moe_conformance.harness.threads import ThreadRankGroup
from moe_conformance.judging.judge import bound_ratio
from moe_conformance.marks import clause, layers, pairs, several_ranks, tails
from moe_conformance.subjects.calls import on_every_rank
from moe_conformance.subjects.layer import LayerSubject, RoutedOutput, on_device
from moe_conformance.subjects.pair import PairSubject
from moe_conformance.subjects.tail import TailSubject, fresh_copy
from moe_conformance.suite.comparisons import require_same, require_unwritten, require_within
from moe_conformance.truth.layer_oracle import finalized_truth
from moe_conformance.verdicts import ClauseBrokenError, UnsupportedCaseError
from moe_contract import PrecomputedRouting, TailOutput, finalize, is_unfinalized


@clause("OUT-1")
@layers(
    {},
    {"method": "deepseek-v3", "scale": 2.5, "ep": 2},
    {"method": "llama4", "top_k": 1},
    # Whichever methods a producer has: its finalized form leaves the factor to the finalizer, or says that it folds it.
    *({"method": method, "scale": 2.5} for method in ("renormalize", "default", "topk", "sigmoid-renorm", "minimax2")),
)
def test_finalized_output_is_the_weighted_sum(layer: LayerSubject) -> None:
    """A finalized output is this rank's weighted sum of its experts, whether or not the producer can defer."""
    for defer in (False, True):
        config = layer.config(defer=defer)
        outputs = layer.run(config)
        layer.require_contract(outputs, config)
        for rank, output in enumerate(outputs):
            if isinstance(output, Tensor):
                value, bound = finalized_truth(layer.truth(rank), output.dtype)
                try:
                    require_within(output, value, bound, clause="OUT-1", field="routed", rank=rank, layer=layer)
                except ClauseBrokenError as error:
                    raise error.blaming(_broken_by_value(layer, rank, output, value, bound)) from error


def _within(output: Tensor, value: Tensor, bound: Tensor) -> bool:
    return not bool((bound_ratio(output.cpu(), value.cpu(), bound.cpu()) > 1.0).any())


def _broken_by_value(layer: LayerSubject, rank: int, output: Tensor, value: Tensor, bound: Tensor) -> str:
    """The clause of a wrong finalized value: the factor is in it, or the deferred path gives another, or neither."""
    factor = layer.parts[rank].routing.routed_scaling_factor
    if factor != 1.0 and _within(output, value * factor, bound * factor):
        return "SCALE-3"
    if layer.defers:
        deferred = layer.run()[rank]
        if is_unfinalized(deferred) and _within(finalize(deferred), value, bound):
            return "DEFER-5"
    return "OUT-1"


@clause("OUT-1")
@tails({"form": "finalized"}, {"form": "finalized", "shared": True, "scale": 2.5})
def test_finalized_tensor_is_accepted(tail: TailSubject) -> None:
    """A consumer that declares it takes a finalized tensor: no top-k sum, everything after it the same."""
    tail.judge(tail.run())


@clause("OUT-2")
@layers({"tokens": 0}, {"tokens": 0, "ep": 2})
def test_no_tokens_give_an_empty_finalized_tensor(layer: LayerSubject) -> None:
    """T = 0 gives [0, H], never the triple."""
    layer.require_contract(layer.run())


@clause("OUT-2")
@tails({"form": "finalized", "tokens": 0}, {"form": "finalized", "tokens": 0, "shared": True})
def test_tail_of_no_tokens_is_empty(tail: TailSubject) -> None:
    """A consumer given no tokens returns empty tensors on every rank."""
    tail.judge(tail.run())


@clause("OUT-2")
@pairs({"tokens": 0}, where=several_ranks)
def test_no_tokens_pass_from_producer_to_consumer(pair: PairSubject) -> None:
    """An empty batch goes through the layer and the tail."""
    pair.require_support()
    inputs = pair.hand_over()
    pair.tail.judge(pair.tail.run(inputs), inputs)


@clause("OUT-3")
@layers()
def test_tensors_are_on_one_device_without_gradients(layer: LayerSubject) -> None:
    """All tensors of one output are on the layer's device and none requires grad, even in a caller that records."""
    layer.require_support()
    config = layer.config()
    part = on_device(layer.parts[0], layer.settings.device)

    def one_rank(group: ThreadRankGroup) -> RoutedOutput:
        with torch.enable_grad():
            hidden, logits = layer.batch(layer.inputs)
            return layer.producer.load(part, config)(hidden.requires_grad_(), logits)

    outputs = on_every_rank(layer.name, layer.settings, 1, one_rank)
    layer.require_contract(outputs, config)


@clause("OUT-4")
@layers({}, {"method": "precomputed"}, where=several_ranks)
def test_producer_does_not_write_its_inputs(layer: LayerSubject) -> None:
    """Hidden states, logits and weights are as they were after the call."""
    layer.require_support()
    inputs, config = layer.inputs, layer.config()
    parts = [on_device(part, layer.settings.device) for part in layer.parts]
    before = [[(name, tensor.clone()) for name, tensor in _weights(part.experts)] for part in parts]

    def one_rank(group: ThreadRankGroup) -> tuple[Tensor, Tensor | PrecomputedRouting]:
        batch = layer.batch(inputs)
        layer.producer.load(parts[group.rank], config)(*batch)
        return batch

    for rank, (hidden, logits) in enumerate(on_every_rank(layer.name, layer.settings, layer.case.ranks, one_rank)):
        require_unwritten(inputs.hidden_states, hidden.cpu(), "hidden_states", rank)
        for name, given, kept in _routing(inputs.router_logits, logits):
            require_unwritten(given, kept.cpu(), name, rank)
        for (name, given), (_, kept) in zip(before[rank], _weights(parts[rank].experts), strict=True):
            require_unwritten(given, kept, f"layer.experts.{name}", rank)


@clause("OUT-4")
@tails({"shared": True, "scale": 2.5, "absent": "quarter", "stratum": "normal"})
def test_consumer_does_not_write_its_inputs(tail: TailSubject) -> None:
    """Rows, weights, map, shared output, residual and norm weight are as they were, unless declared in place."""
    tail.require_support()
    inputs = tail.inputs
    capacity = inputs.capacity(tail.case)

    def one_rank(group: ThreadRankGroup) -> tuple[TailInputs, TailOutput]:
        own = fresh_copy(inputs, group.rank, tail.settings.device)
        opened = tail.consumer.open(group, capacity)
        output = opened(own.outputs[0], own.residual, own.norm_weight, eps=own.eps, weight_bias=own.weight_bias)
        opened.close()
        return own, output

    for rank, (own, _) in enumerate(on_every_rank(tail.name, tail.settings, tail.case.ranks, one_rank)):
        for name, given, kept in _handed(inputs, own, rank):
            if name != "residual" or not tail.declaration.in_place_residual:
                require_unwritten(given, kept.cpu(), name, rank)


@clause("OUT-5")
@layers(where=several_ranks)
def test_output_outlives_the_next_call(layer: LayerSubject) -> None:
    """An output holds its bits while the producer runs again on other tokens."""
    layer.require_support()
    if layer.declaration.borrowed:
        raise UnsupportedCaseError(f"{layer.name} declares that its output is borrowed until the next call")
    inputs, config = layer.inputs, layer.config()
    layer.require_form(layer.run(config), config)

    def one_rank(group: ThreadRankGroup) -> tuple[RoutedOutput, RoutedOutput]:
        loaded = layer.producer.load(on_device(layer.parts[group.rank], layer.settings.device), config)
        hidden, logits = layer.batch(inputs)
        first = loaded(hidden, logits)
        kept = map_routed(first, Tensor.clone)
        loaded(torch.flip(hidden, (0,)) * 2, logits)
        return kept, first

    for rank, (kept, first) in enumerate(on_every_rank(layer.name, layer.settings, layer.case.ranks, one_rank)):
        for name, a, b in _fields(kept, first):
            require_same(a.cpu(), b.cpu(), "OUT-5", name, "a second call of the producer", rank)


def _weights(experts: object) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, tensor in vars(experts).items() if isinstance(tensor, Tensor)]


def _routing(given: Tensor | PrecomputedRouting, kept: Tensor | PrecomputedRouting) -> list[tuple[str, Tensor, Tensor]]:
    if isinstance(given, PrecomputedRouting) and isinstance(kept, PrecomputedRouting):
        return [("ids", given.ids, kept.ids), ("weights", given.weights, kept.weights)]
    assert isinstance(given, Tensor) and isinstance(kept, Tensor)
    return [("router_logits", given, kept)]


def _handed(inputs: TailInputs, own: TailInputs, rank: int) -> list[tuple[str, Tensor, Tensor]]:
    """What a rank was given, and the copy that its consumer had in hand."""
    given, kept = inputs.outputs[rank], own.outputs[0]
    pairs_ = [(name, a, b) for name, a, b in _fields(given.routed, kept.routed)]
    assert given.shared_output is not None and kept.shared_output is not None
    pairs_.append(("shared_output", given.shared_output, kept.shared_output))
    pairs_.append(("residual", inputs.residual, own.residual))
    pairs_.append(("norm_weight", inputs.norm_weight, own.norm_weight))
    return pairs_


def _fields(a: RoutedOutput, b: RoutedOutput) -> list[tuple[str, Tensor, Tensor]]:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return [("routed", a, b)]
    names = ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")
    return [(name, getattr(a, name), getattr(b, name)) for name in names]
