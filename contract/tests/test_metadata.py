"""Every branch of the metadata tier names clause, field, what came and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_contract import Expectation, MoEConfig, MoEOutput, ProducerDeclaration, RoutingMethod, UnfinalizedMoEOutput
from moe_contract.checks import check

from .lattice import NUM_ROWS, H, K, T, expectation, lattice, layered, only, route_major_triple, small_layer, triple


def spoiled(field: str, change: Callable[[Tensor], object]) -> UnfinalizedMoEOutput:
    """A correct triple with one field changed."""
    good = triple()
    return replace(good, **{field: change(getattr(good, field))})


def shifted_base(rows: Tensor) -> Tensor:
    """The same rows, 2 bytes past an aligned address."""
    buffer = torch.empty(rows.numel() + 1, dtype=rows.dtype)
    view = buffer[1:].view(rows.shape)
    view.copy_(rows)
    return view


def padded_view(rows: Tensor) -> Tensor:
    """The logical columns of a buffer whose rows are wider."""
    return torch.cat([rows, rows], dim=1)[:, : rows.shape[1]]


ROWS, WEIGHTS, MAP = "gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx"
BROKEN_FIELDS = {
    "rows 3-D": (ROWS, lambda r: r[:12].view(T, K, H), "ROWS-1", "shape [4, 3, 16]", "not [T, K, H]"),
    "rows flat": (ROWS, lambda r: r.flatten(), "ROWS-1", f"shape [{NUM_ROWS * H}]", "[P, 16]"),
    "rows dtype": (ROWS, lambda r: r.half(), "ROWS-1", "float16", "activation dtype bfloat16"),
    "rows sparse": (ROWS, lambda r: r.to_sparse(), "ROWS-1", "torch.sparse_coo", "[P, 16]"),
    "rows view of padded": (ROWS, padded_view, "ROWS-1", "strides (32, 1)", "strides (16, 1)"),
    "rows transposed": (ROWS, lambda r: r.t().contiguous().t(), "ROWS-1", f"strides (1, {NUM_ROWS})", "(16, 1)"),
    "rows misaligned": (ROWS, shifted_base, "ROWS-1", "bytes past a multiple of 16", "16-byte aligned"),
    "rows padded": (ROWS, lambda r: torch.cat([r, r], 1), "ROWS-4", "width 32", "hidden size 16"),
    "rows narrow": (ROWS, lambda r: r[:, :8].contiguous(), "ROWS-4", "width 8", "hidden size 16"),
    "rows a list": (ROWS, lambda r: r.tolist(), "OUT-1", f"a list of {NUM_ROWS}", "a tensor"),
    "rows none": (ROWS, lambda r: None, "OUT-1", "None", "a tensor"),
    "weights dtype": (WEIGHTS, lambda w: w.float(), "WGT-2", "float32", "declared weights dtype bfloat16"),
    "weights flat": (WEIGHTS, lambda w: w.flatten(), "WGT-1", "a flat [T * K] tensor [12]", "[4, 3]"),
    "weights slot-major": (WEIGHTS, lambda w: w.t().contiguous(), "WGT-1", "slot-major [K, T]", "[4, 3]"),
    "weights strided": (WEIGHTS, lambda w: torch.stack([w, w], 2)[..., 0], "WGT-1", "strides (6, 2)", "contiguous"),
    "weights a number": (WEIGHTS, lambda w: 1.0, "OUT-1", "a float", "a tensor"),
    "map int64": (MAP, lambda m: m.long(), "MAP-1", "int64", "int32"),
    "map flat": (MAP, lambda m: m.flatten(), "MAP-1", "a flat [T * K] tensor [12]", "reshape to [T, K]"),
    "map slot-major": (MAP, lambda m: m.t().contiguous(), "MAP-1", "slot-major [K, T] tensor [3, 4]", ".t()"),
    "map transposed view": (MAP, lambda m: m.t().contiguous().t(), "MAP-1", "view of a slot-major", "[T, K]"),
    "map strided": (MAP, lambda m: torch.stack([m, m], 2)[..., 0], "MAP-1", "strides (6, 2)", "contiguous"),
    "map other K": (MAP, lambda m: m[:, :2].contiguous(), "MAP-1", "[4, 2]: 2 slots per token", "[4, 3]"),
    "map other T": (MAP, lambda m: m[:2], "MAP-1", "[2, 3]", "[4, 3]"),
    "map sparse": (MAP, lambda m: m.to_sparse(), "MAP-1", "torch.sparse_coo", "[4, 3]"),
    "map a tuple": (MAP, lambda m: tuple(m), "OUT-1", "a tuple of 4", "a tensor"),
    "rows need grad": (ROWS, lambda r: r.requires_grad_(), "OUT-3", "requires_grad=True", "no autograd"),
    "weights need grad": (WEIGHTS, lambda w: w.requires_grad_(), "OUT-3", "requires_grad=True", "no autograd"),
    "map elsewhere": (MAP, lambda m: m.to("meta"), "OUT-3", "on meta", "on cpu"),
}


@pytest.mark.parametrize("case", BROKEN_FIELDS.values(), ids=BROKEN_FIELDS)
@pytest.mark.parametrize("tier", ["metadata", "values"])
def test_broken_field_is_blamed_on_its_clause_alone(
    case: tuple[str, Callable[[Tensor], object], str, str, str], tier: str
) -> None:
    """One spoiled field gives one violation with its clause, place, what came and what to do, in either tier."""
    field, change, clause, got, text = case
    violation = only(check(spoiled(field, change), expectation(rank=1), tier=tier))
    assert (violation.clause, violation.field, violation.rank) == (clause, field, 1)
    assert got in violation.got
    assert text in str(violation)


@pytest.mark.parametrize("wrap", [lambda routed: routed, layered], ids=["bare", "in a layer's output"])
@pytest.mark.parametrize(
    ("routed", "changes"),
    [
        (triple(), {}),
        (triple(), {"device": None, "deferred": True}),
        (triple(torch.float16), {"dtype": torch.float16, "weights_dtype": torch.float16}),
        (triple(weights_dtype=torch.float32), {"weights_dtype": torch.float32}),
        (route_major_triple(), {"route_major": True}),
        (lattice(T, H), {}),
        (lattice(T, H), {"deferred": False}),
    ],
    ids=["1.0", "any device", "fp16", "fp32 weights", "route-major", "finalized", "finalized on demand"],
)
def test_correct_output_is_never_blamed(
    wrap: Callable[[object], object], routed: UnfinalizedMoEOutput | Tensor, changes: dict[str, object]
) -> None:
    """Every legal form passes both tiers."""
    output = wrap(routed)
    if isinstance(output, MoEOutput) and changes.get("dtype") is torch.float16:
        output.shared_output = lattice(T, H, dtype=torch.float16)
    assert check(output, expectation(**changes)) == []


def test_strides_of_a_single_row_and_of_no_row_are_ignored() -> None:
    """torch gives dimensions of size 0 and 1 any stride; no consumer multiplies by it."""
    one = expectation(num_tokens=1, top_k=1)
    row = torch.zeros(1, 2 * H, dtype=torch.bfloat16)[:, :H]
    assert row.stride(0) != H
    ones = torch.ones(1, 1, dtype=torch.bfloat16)
    assert check(UnfinalizedMoEOutput(row, ones, torch.zeros(1, 1, dtype=torch.int32)), one) == []
    nothing = torch.zeros(0, H, dtype=torch.bfloat16)
    assert check(UnfinalizedMoEOutput(nothing, ones, torch.full((1, 1), -1, dtype=torch.int32)), one) == []


def test_square_slot_major_view_is_named_as_such() -> None:
    """With T == K the shape cannot tell token-major from slot-major; the strides of a transposed view can."""
    square = expectation(num_tokens=3, top_k=3)
    mapped = torch.arange(9, dtype=torch.int32).reshape(3, 3).t()
    output = UnfinalizedMoEOutput(lattice(9, H), torch.ones(3, 3, dtype=torch.bfloat16), mapped)
    violation = only(check(output, square))
    assert violation.clause == "MAP-1" and "slot-major" in violation.got and "T == K" in violation.hint


def test_swapped_tokens_and_slots_are_told_apart_at_two_by_three() -> None:
    """T=2, K=3 is the smallest case in which a slot-major map has another shape."""
    output = UnfinalizedMoEOutput(
        lattice(6, H), torch.ones(2, 3, dtype=torch.bfloat16), torch.arange(6, dtype=torch.int32).reshape(3, 2)
    )
    assert "slot-major [K, T]" in only(check(output, expectation(num_tokens=2))).got


@pytest.mark.parametrize(
    ("routed", "changes", "clause", "got", "expected"),
    [
        (lattice(T, H), {"deferred": True}, "DEFER-1", "a finalized tensor", "an UnfinalizedMoEOutput"),
        (triple(), {"deferred": False}, "DEFER-1", "an unfinalized UnfinalizedMoEOutput", "a finalized tensor [4, 16]"),
        (triple(), {"num_tokens": 0}, "OUT-2", "UnfinalizedMoEOutput for 0 tokens", "[0, 16]"),
        (lattice(0, 8), {"num_tokens": 0}, "OUT-2", "shape [0, 8]", "[0, 16]"),
        (lattice(T * H), {}, "OUT-1", "shape [64]", "[4, 16]"),
        (lattice(T, 2 * H), {}, "OUT-1", "shape [4, 32]", "[4, 16]"),
        (lattice(T, H).float(), {}, "OUT-1", "float32", "activation dtype bfloat16"),
        (lattice(T, H).to_sparse(), {}, "OUT-1", "torch.sparse_coo", "[4, 16]"),
        (lattice(T, H).to("meta"), {}, "OUT-3", "on meta", "on cpu"),
        (lattice(T, H).requires_grad_(), {}, "OUT-3", "requires_grad=True", "no autograd"),
        (route_major_triple(), {}, "DEFER-4", "True", "not accepted"),
        (replace(triple(), route_major=1), {}, "OUT-1", "a int", "True or False"),
        (replace(triple(), route_major=True), {"route_major": True}, "MAP-1", "20 rows", "T * K = 12 rows"),
    ],
)
@pytest.mark.parametrize("bare", [True, False])
def test_wrong_form_is_named(
    routed: UnfinalizedMoEOutput | Tensor, changes: dict[str, object], clause: str, got: str, expected: str, bare: bool
) -> None:
    """Finalized or not, for how many tokens, in which form: each mismatch is its clause's own."""
    output = routed if bare else MoEOutput(routed)
    violation = only(check(output, expectation(**changes), tier="metadata"))
    assert violation.clause == clause
    assert got in violation.got and expected in violation.expected


def test_deferral_is_not_demanded_of_an_empty_call() -> None:
    """T = 0 gives the finalized empty tensor even where deferral is on (OUT-2 before DEFER-1)."""
    assert check(lattice(0, H), expectation(num_tokens=0, deferred=True)) == []


def test_flat_view_is_explained() -> None:
    """The hint says what a flat tensor of the right size is."""
    assert "flat view" in only(check(lattice(T * H), expectation())).hint


@pytest.mark.parametrize(
    ("nonsense", "got"),
    [
        (None, "None"),
        ("rows", "a str"),
        (3, "a int"),
        (float("nan"), "a float"),
        ({}, "a dict"),
        ([], "a list of 0"),
        ([torch.zeros(1), torch.zeros(1), torch.zeros(1)], "a list of 3"),
        ((torch.zeros(1), [torch.zeros(1)]), "a tuple of 2"),
        (object(), "a object"),
        (UnfinalizedMoEOutput, "a type"),
        (MoEOutput(MoEOutput(lattice(T, H))), "a MoEOutput"),
        (MoEOutput(None), "None"),
        (MoEOutput([triple()]), "a list of 1"),
    ],
)
@pytest.mark.parametrize("tier", ["metadata", "values"])
def test_nonsense_is_a_violation_not_an_exception(nonsense: object, got: str, tier: str) -> None:
    """Whatever a backend returns, the check answers with OUT-1 and its type."""
    violations = check(nonsense, expectation(), tier=tier)
    assert {violation.clause for violation in violations} == {"OUT-1"}
    assert any(got in violation.got for violation in violations)


@pytest.mark.parametrize(
    ("shared", "clause", "got"),
    [
        ([1.0], "SHARED-1", "a list of 1"),
        (lattice(T * 2, H), "SHARED-1", "shape [8, 16]"),
        (lattice(T, H).float(), "SHARED-1", "float32"),
        (lattice(T, H).to("meta"), "OUT-3", "on meta"),
        (lattice(T, H).requires_grad_(), "OUT-3", "requires_grad=True"),
    ],
)
def test_wrong_shared_output_is_named(shared: object, clause: str, got: str) -> None:
    """The shared output is this rank's [T, H] in the activation dtype, on the output's device."""
    violation = only(check(MoEOutput(triple(), shared), expectation()))
    assert (violation.clause, violation.field) == (clause, "shared_output") and got in violation.got


@pytest.mark.parametrize(
    ("scale", "got"), [(None, "None"), (True, "a bool"), (torch.ones(()), "a Tensor"), (float("nan"), "nan")]
)
def test_wrong_scale_is_named(scale: object, got: str) -> None:
    """The factor is a finite Python number: a tensor would have to be read from the device."""
    violation = only(check(MoEOutput(triple(), None, scale), expectation()))
    assert (violation.clause, violation.field) == ("SCALE-1", "routed_scaling_factor") and got in violation.got


def test_two_faults_are_both_reported() -> None:
    """Independent faults do not hide each other."""
    output = replace(triple(), expert_weights=triple().expert_weights.float(), gemm2_permuted=lattice(NUM_ROWS, 8))
    assert [violation.clause for violation in check(output, expectation())] == ["ROWS-4", "WGT-2"]


def test_output_on_another_kind_of_device_is_named() -> None:
    """The expected device is named beside the one it came on."""
    output = lattice(T, H).to("meta")
    assert check(output, expectation(device=torch.device("meta")), tier="metadata") == []
    violation = only(check(output, expectation(device=torch.device("cuda", 0)), tier="metadata"))
    assert (violation.clause, violation.got) == ("OUT-3", "on meta") and "on cuda:0" in violation.expected


def test_expectation_of_a_call_follows_declaration_and_config() -> None:
    """Sizes come from the layer, weights dtype and route-major from the declaration, deferral from the config."""
    layer = small_layer()
    config = MoEConfig(defer_moe_finalize=True, tp_size=2, max_deferred_tokens=T)
    plain = Expectation.of_call(ProducerDeclaration(name="p"), layer, config, T, rank=1)
    assert plain == expectation(deferred=True, rank=1)
    assert Expectation.of_call(ProducerDeclaration(name="p"), layer, config, T + 1).deferred is False
    declared = ProducerDeclaration(name="p", can_defer=False, weights_dtypes=frozenset({"float32"}), route_major=True)
    other = Expectation.of_call(declared, layer, config, T)
    assert (other.deferred, other.weights_dtype, other.route_major) == (False, torch.float32, True)
    llama = small_layer(method=RoutingMethod.LLAMA4)
    assert Expectation.of_call(ProducerDeclaration(name="p"), llama, config, T).deferred is False
