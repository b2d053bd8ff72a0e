"""What the reference tail refuses: on metadata alone, before any collective, in one line that names the clause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_backends.reference.consumer import PROFILE_C, ReferenceConsumer
from moe_contract import (
    ContractViolation,
    MoEOutput,
    QuantFormat,
    QuantRecipe,
    TailCapacity,
    UnfinalizedMoEOutput,
    UnsupportedError,
)

from .thread_group import ThreadGroup, lattice_output, run_ranks, thread_groups

BF16 = torch.bfloat16
TOKENS, TOP_K, HIDDEN = 2, 3, 32  # the smallest T and K that tell a flat or slot-major map from a legal one
CAPACITY = TailCapacity(TOKENS, HIDDEN, TOP_K, BF16)


def call(
    output: Any, residual: Any = None, norm_weight: Any = None, declaration: Any = PROFILE_C, **options: Any
) -> None:
    """One call on one rank, every argument legal unless given."""
    (group,) = thread_groups(1)
    tail = ReferenceConsumer(declaration).open(group, CAPACITY)
    residual = torch.zeros(TOKENS, HIDDEN, dtype=BF16) if residual is None else residual
    norm_weight = torch.ones(HIDDEN) if norm_weight is None else norm_weight
    tail(output, residual, norm_weight, **{"eps": 1e-6, **options})


def legal() -> MoEOutput:
    """A legal unfinalized output."""
    return lattice_output(0, TOKENS, TOP_K, HIDDEN, BF16)


def with_triple(**changed: Callable[[Tensor], Any]) -> MoEOutput:
    """A legal output with some fields of its triple mapped."""
    output = legal()
    assert isinstance(output.routed, UnfinalizedMoEOutput)
    fields = {name: change(getattr(output.routed, name)) for name, change in changed.items()}
    return replace(output, routed=replace(output.routed, **fields))


def strided(tensor: Tensor) -> Tensor:
    """The same values with a row stride of twice the width."""
    return torch.cat((tensor, tensor), dim=1)[:, : tensor.shape[1]]


def test_the_legal_call_is_accepted() -> None:
    """The case that the others change is accepted."""
    call(legal())


BROKEN_TRIPLES = [
    ("ROWS-1", {"gemm2_permuted": lambda t: t.half()}),
    ("ROWS-1", {"gemm2_permuted": strided}),
    ("ROWS-1", {"gemm2_permuted": lambda t: t.flatten()}),
    ("ROWS-4", {"gemm2_permuted": lambda t: torch.nn.functional.pad(t, (0, 8))}),
    ("WGT-1", {"expert_weights": lambda t: t[:, :2].contiguous()}),
    ("WGT-1", {"expert_weights": strided}),
    ("WGT-2", {"expert_weights": lambda t: t.half()}),
    ("WGT-2", {"expert_weights": lambda t: t.double()}),
    ("MAP-1", {"expanded_idx_to_permuted_idx": lambda t: t.flatten()}),
    ("MAP-1", {"expanded_idx_to_permuted_idx": lambda t: t.t().contiguous()}),
    ("MAP-1", {"expanded_idx_to_permuted_idx": lambda t: t.long()}),
    ("MAP-1", {"expanded_idx_to_permuted_idx": strided}),
]


@pytest.mark.parametrize(("clause", "change"), BROKEN_TRIPLES)
def test_broken_triple_is_refused_by_its_clause(clause: str, change: dict[str, Callable[[Tensor], Any]]) -> None:
    """Each kind of breach is one line that names its clause and its field, and blames no other clause."""
    with pytest.raises(ContractViolation) as caught:
        call(with_triple(**change))
    assert {violation.clause for violation in caught.value.violations} == {clause}
    assert str(caught.value).startswith(f"{clause}: {next(iter(change))}: got ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("clause", "output"),
    [
        ("OUT-1", [legal()]),
        ("OUT-1", MoEOutput((torch.zeros(TOKENS, HIDDEN, dtype=BF16),))),  # type: ignore[arg-type]  # the breach
        ("OUT-1", MoEOutput(torch.zeros(TOKENS * HIDDEN, dtype=BF16))),
        ("OUT-1", MoEOutput(torch.zeros(TOKENS, HIDDEN))),
        ("OUT-1", MoEOutput(torch.zeros(0, HIDDEN, dtype=BF16))),
        ("SCALE-1", replace(legal(), routed_scaling_factor=torch.tensor(2.0))),  # type: ignore[type-var]  # the breach
        ("SHARED-1", replace(legal(), shared_output=torch.zeros(TOKENS, HIDDEN))),
        ("SHARED-1", replace(legal(), shared_output=torch.zeros(1, HIDDEN, dtype=BF16))),
    ],
)
def test_broken_output_is_refused_by_its_clause(clause: str, output: Any) -> None:
    """What is not an output of the contract, or has a part of another shape or dtype, is refused."""
    with pytest.raises(ContractViolation, match=f"^{clause}: [^\n]*$"):
        call(output)


@pytest.mark.parametrize(
    ("clause", "arguments"),
    [
        ("RED-3", {"residual": torch.zeros(TOKENS, HIDDEN)}),
        ("RED-3", {"residual": torch.zeros(TOKENS, HIDDEN + 1, dtype=BF16)}),
        ("NORM-1", {"norm_weight": torch.ones(HIDDEN + 1)}),
        ("NORM-1", {"norm_weight": torch.ones(HIDDEN, dtype=torch.float16)}),
        ("NORM-1", {"norm_weight": torch.ones(HIDDEN, device="meta")}),
    ],
)
def test_broken_residual_or_norm_weight_is_refused(clause: str, arguments: dict[str, Tensor]) -> None:
    """A residual or norm weight of another width, dtype or device is refused."""
    with pytest.raises(ContractViolation, match=f"^{clause}: [^\n]*$"):
        call(legal(), **arguments)


def test_tensors_of_two_devices_are_refused() -> None:
    """A map on another device than the residual is refused, not copied over (OUT-3)."""
    with pytest.raises(ContractViolation, match="on meta"):
        call(with_triple(expanded_idx_to_permuted_idx=lambda t: t.to("meta")))


@pytest.mark.parametrize(
    ("declared", "output", "options", "message"),
    [
        ({"weights_dtypes": {"activation"}}, with_triple(expert_weights=Tensor.float), {}, "WGT-2: .*float32"),
        ({"accepts_finalized": False}, MoEOutput(torch.zeros(TOKENS, HIDDEN, dtype=BF16)), {}, "DEFER-4"),
        ({"norm_weight_dtypes": {"activation"}}, legal(), {}, "NORM-1"),
        ({"weight_bias": False}, legal(), {"weight_bias": 1.0}, "NORM-2"),
        ({"quant_formats": set()}, legal(), {"quant": QuantRecipe(QuantFormat.NVFP4)}, "QUANT-1"),
        ({}, legal(), {"quant": QuantRecipe(QuantFormat.FP8_STATIC, scale=0.0)}, "QUANT-1: scale"),
    ],
)
def test_what_the_declaration_excludes_is_refused(
    declared: dict[str, Any], output: MoEOutput, options: dict[str, Any], message: str
) -> None:
    """Legal arguments outside the declaration are unsupported, not violations."""
    declaration = type(PROFILE_C).model_validate({**PROFILE_C.model_dump(), **declared})
    with pytest.raises(UnsupportedError, match=f"^reference: {message}[^\n]*$"):
        call(output, declaration=declaration, **options)


def test_route_major_rows_are_refused_where_they_are_not_declared() -> None:
    """Contract 1.1's optional form is accepted only by a consumer that declares it (DEFER-4)."""
    rows = torch.zeros(TOKENS * TOP_K, HIDDEN, dtype=BF16)
    index_map = torch.arange(TOKENS * TOP_K, dtype=torch.int32).view(TOKENS, TOP_K)
    triple = UnfinalizedMoEOutput(rows, torch.ones(TOKENS, TOP_K, dtype=BF16), index_map, route_major=True)
    call(MoEOutput(triple))
    with pytest.raises(ContractViolation, match=r"^DEFER-4: [^\n]*$"):
        call(MoEOutput(triple), declaration=PROFILE_C.model_copy(update={"route_major": False}))


def test_triple_for_no_tokens_is_refused() -> None:
    """T = 0 is the finalized empty tensor, never the triple (OUT-2)."""
    output = lattice_output(0, 0, TOP_K, HIDDEN, BF16)
    with pytest.raises(ContractViolation, match=r"^OUT-2: [^\n]*$"):
        call(replace(output, shared_output=None), torch.zeros(0, HIDDEN, dtype=BF16))


def test_one_token_past_capacity_is_refused_on_every_rank_before_any_collective() -> None:
    """At the capacity a call works; one token more is refused by all ranks alike, and none waits for another."""

    def body(group: ThreadGroup) -> str:
        tail = ReferenceConsumer(PROFILE_C).open(group, CAPACITY)
        output = lattice_output(group.rank, TOKENS + 1, TOP_K, HIDDEN, BF16)
        with pytest.raises(UnsupportedError) as caught:
            tail(output, torch.zeros(TOKENS + 1, HIDDEN, dtype=BF16), torch.ones(HIDDEN), eps=1e-6)
        return str(caught.value)

    groups = thread_groups(4)
    messages = run_ranks(groups, body)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"reference: CAP-1: {TOKENS + 1} tokens are past the {TOKENS} ")
    assert [group.collectives for group in groups] == [[]] * 4


@pytest.mark.parametrize(
    ("declared", "capacity", "clause"),
    [
        ({"world_sizes": frozenset({2})}, {}, "CAP-1: 1 ranks are not among its world_sizes"),
        ({"devices": frozenset({"cuda"})}, {}, "CAP-2: cpu is not among its devices"),
        ({}, {"dtype": torch.float32}, "CAP-1: float32 is not among its dtypes"),
        ({"max_tokens": TOKENS - 1}, {}, "CAP-1: max_tokens"),
        ({"max_top_k": TOP_K - 1}, {}, "CAP-1: max_top_k is"),
        ({"max_hidden_size": HIDDEN - 1}, {}, "CAP-1: max_hidden_size is"),
        ({"hidden_size_multiple": HIDDEN + 1}, {}, "CAP-1: hidden size must be a multiple of"),
    ],
)
def test_capacity_past_a_declared_limit_is_refused_at_open(
    declared: dict[str, Any], capacity: dict[str, Any], clause: str
) -> None:
    """A tail is not opened for what its declaration excludes."""
    (group,) = thread_groups(1)
    consumer = ReferenceConsumer(PROFILE_C.model_copy(update=declared))
    with pytest.raises(UnsupportedError, match=f"^reference: {clause}"):
        consumer.open(group, replace(CAPACITY, **capacity))


def test_limits_themselves_are_accepted() -> None:
    """A tail opens exactly at its declared limits."""
    limits = {"max_tokens": TOKENS, "max_top_k": TOP_K, "max_hidden_size": HIDDEN, "hidden_size_multiple": HIDDEN}
    (group,) = thread_groups(1)
    ReferenceConsumer(PROFILE_C.model_copy(update={**limits, "world_sizes": frozenset({1})})).open(group, CAPACITY)


def test_declaration_that_it_would_not_keep_is_refused() -> None:
    """The reference never writes the residual, so it cannot be declared to."""
    with pytest.raises(ValueError, match="in_place_residual"):
        ReferenceConsumer(PROFILE_C.model_copy(update={"in_place_residual": True}))


def test_nvfp4_of_a_width_without_whole_blocks_is_refused() -> None:
    """H = 24 has no whole number of blocks of 16."""
    (group,) = thread_groups(1)
    tail = ReferenceConsumer(PROFILE_C).open(group, replace(CAPACITY, hidden_size=24))
    zeros = torch.zeros(TOKENS, 24, dtype=BF16)
    with pytest.raises(UnsupportedError, match="multiple of 16, got 24"):
        tail(MoEOutput(zeros), zeros, torch.ones(24), eps=1e-6, quant=QuantRecipe(QuantFormat.NVFP4))


def test_foreign_triple_with_a_field_that_is_no_tensor_is_refused() -> None:
    """An object that only looks like the triple is refused by clause, not by an AttributeError."""
    routed = SimpleNamespace(gemm2_permuted=None, expert_weights=[1.0], expanded_idx_to_permuted_idx=None)
    with pytest.raises(ContractViolation) as caught:
        call(MoEOutput(routed))  # type: ignore[arg-type]  # the breach
    assert {violation.clause for violation in caught.value.violations} == {"OUT-1"}
