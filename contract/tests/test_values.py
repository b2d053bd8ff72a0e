"""Every branch of the values tier names the token, the slot and the value."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_contract import ContractViolation, UnfinalizedMoEOutput
from moe_contract.checks import check, require

from .lattice import NUM_ROWS, H, K, T, expectation, lattice, only, route_major_triple, triple

MAP = "expanded_idx_to_permuted_idx"


def with_entries(output: UnfinalizedMoEOutput, *entries: tuple[int, int, int]) -> UnfinalizedMoEOutput:
    """A copy whose map holds ``value`` at each (token, slot, value)."""
    mapped = output.expanded_idx_to_permuted_idx.clone()
    for token, slot, value in entries:
        mapped[token, slot] = value
    return replace(output, expanded_idx_to_permuted_idx=mapped)


@pytest.mark.parametrize("value", [-2, -(2**31), NUM_ROWS, 2**31 - 1])
def test_stray_map_entry_is_named_with_its_place_and_value(value: int) -> None:
    """Anything but -1 and [0, P) is MAP-2, at its token and slot."""
    violation = only(check(with_entries(triple(), (2, 1, value)), expectation()))
    assert (violation.clause, violation.token, violation.slot, violation.value) == ("MAP-2", 2, 1, value)
    assert violation.got == str(value) and violation.expected == f"-1 or a row in [0, {NUM_ROWS})"


def test_several_stray_entries_are_counted() -> None:
    """The first is described, the others counted; equal stray entries are not duplicates as well."""
    violation = only(check(with_entries(triple(), (3, 0, 99), (1, 2, 99)), expectation()))
    assert (violation.token, violation.slot, violation.count) == (1, 2, 2)


@pytest.mark.parametrize("value", [-1, 0, NUM_ROWS - 1])
def test_entries_at_the_edges_are_legal(value: int) -> None:
    """-1, row 0 and row P - 1 are all legal, wherever they stand."""
    used = triple().expanded_idx_to_permuted_idx
    places = (used == value).nonzero().tolist()
    token, slot = places[0] if places else (0, 0)
    assert check(with_entries(triple(), (token, slot, value)), expectation()) == []


def test_doubled_row_is_named_with_both_places() -> None:
    """Two routes that share a row are MAP-3; the later one is the place, the earlier one is in the text."""
    row = int(triple().expanded_idx_to_permuted_idx[0, 2])
    violation = only(check(with_entries(triple(), (3, 1, row)), expectation()))
    assert (violation.clause, violation.token, violation.slot, violation.value) == ("MAP-3", 3, 1, row)
    assert violation.got == f"row {row}, which token 0, slot 2 has too"


def test_first_of_several_doubled_rows_is_described() -> None:
    """In token order, whatever the order of the rows; the others are counted."""
    output = with_entries(
        replace(triple(), expanded_idx_to_permuted_idx=torch.arange(T * K, dtype=torch.int32).reshape(T, K)),
        (1, 1, 3),
        (3, 2, 0),
    )
    violation = only(check(output, expectation()))
    assert (violation.token, violation.slot, violation.value, violation.count) == (1, 1, 3, 2)


def test_absent_slots_are_not_duplicates_of_each_other() -> None:
    """-1 may stand anywhere, any number of times."""
    mapped = torch.full((T, K), -1, dtype=torch.int32)
    assert check(replace(triple(), expanded_idx_to_permuted_idx=mapped), expectation()) == []


def test_route_major_map_must_be_the_identity() -> None:
    """A permuted map under route_major=True is MAP-1 at its first wrong entry; -1 stays legal."""
    output = with_entries(route_major_triple(), (0, 0, -1), (1, 0, 5), (1, 2, 3))
    violation = only(check(output, expectation(route_major=True)))
    assert (violation.clause, violation.token, violation.slot, violation.value) == ("MAP-1", 1, 0, 5)
    assert violation.expected == "-1 or 3 = t * K + k, since route_major is True" and violation.count == 2
    assert check(with_entries(route_major_triple(), (2, 2, -1)), expectation(route_major=True)) == []


def test_doubled_row_of_a_route_major_map_is_blamed_as_such() -> None:
    """A shared row explains the broken identity, so only MAP-3 is reported."""
    assert only(check(with_entries(route_major_triple(), (3, 0, 0)), expectation(route_major=True))).clause == "MAP-3"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weight_that_no_router_writes_is_named(value: float, dtype: torch.dtype) -> None:
    """A used weight that is not finite or has a huge exponent is WGT-3 at its place."""
    output = triple(weights_dtype=dtype)
    output.expert_weights[1, 2] = value
    violation = only(check(output, expectation(weights_dtype=dtype)))
    assert (violation.clause, violation.field) == ("WGT-3", "expert_weights")
    assert (violation.token, violation.slot) == (1, 2)


def test_weight_of_an_absent_slot_may_hold_anything() -> None:
    """Where the map says -1 the weight is never used (MAP-4)."""
    output = with_entries(triple(), (1, 2, -1))
    output.expert_weights[1, 2] = float("nan")
    assert check(output, expectation()) == []


def test_nonfinite_rows_are_no_violation() -> None:
    """A NaN in a row that is referenced is a result that must propagate; in another it is never read."""
    output = triple()
    output.gemm2_permuted.fill_(float("nan"))
    assert check(output, expectation()) == []


def random_weights(tokens: int, top_k: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What a softmax router writes."""
    logits = torch.randn(tokens, top_k, generator=torch.Generator().manual_seed(seed))
    return logits.softmax(dim=1).to(dtype)


def reinterpreted(weights: Tensor, tokens: int = 8, top_k: int = 4) -> UnfinalizedMoEOutput:
    """A correct output of [tokens, top_k] routes with these weights."""
    mapped = torch.arange(tokens * top_k, dtype=torch.int32).reshape(tokens, top_k)
    return UnfinalizedMoEOutput(lattice(tokens * top_k, H), weights.reshape(tokens, top_k), mapped)


def filled(dtype: torch.dtype, written: Tensor) -> Tensor:
    """A zeroed [8, 4] buffer labelled ``dtype`` into whose bytes ``written`` went."""
    buffer = torch.zeros(32, dtype=dtype)
    buffer.view(written.dtype)[: written.numel()] = written.flatten()
    return buffer


def test_bfloat16_bytes_read_as_float32_are_recognised() -> None:
    """A 16-bit store into a float32 buffer leaves pairs in its first half; the hint says so."""
    weights = filled(torch.float32, random_weights(8, 4, torch.bfloat16))
    expected = expectation(num_tokens=8, top_k=4, weights_dtype=torch.float32)
    violation = only(check(reinterpreted(weights), expected))
    assert violation.clause == "WGT-3" and "pairs of bfloat16 weights read as float32" in violation.hint


def test_single_bfloat16_weight_in_a_float32_element_is_recognised() -> None:
    """T=1, K=1: the weight sits in the low half, and the element reads as a subnormal number."""
    weights = torch.zeros(1, 1, dtype=torch.float32)
    weights.view(torch.bfloat16)[0, 0] = 1.0
    output = UnfinalizedMoEOutput(lattice(1, H), weights, torch.zeros(1, 1, dtype=torch.int32))
    violation = only(check(output, expectation(num_tokens=1, top_k=1, weights_dtype=torch.float32)))
    assert violation.clause == "WGT-3" and "low half" in violation.hint


@pytest.mark.parametrize("lattice_weights", [False, True], ids=["random", "powers of two"])
def test_float32_bytes_read_as_bfloat16_are_recognised(lattice_weights: bool) -> None:
    """Every other 16-bit element is the low half of a float32 weight: random bits, or zero where it has none."""
    wide = random_weights(4, 4, torch.float32)
    if lattice_weights:
        wide = torch.exp2(wide.log2().round())
    weights = wide.flatten().view(torch.bfloat16)
    violation = only(check(reinterpreted(weights), expectation(num_tokens=8, top_k=4)))
    assert violation.clause == "WGT-3" and "float32 weights read in 16 bits" in violation.hint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_of_real_routers_are_never_blamed(dtype: torch.dtype) -> None:
    """Softmax weights, equal weights, lattice weights and zeros of 50 seeds each pass."""
    activation = torch.float16 if dtype is torch.float16 else torch.bfloat16
    expected = expectation(num_tokens=8, top_k=4, dtype=activation, weights_dtype=dtype)
    for seed in range(50):
        random = random_weights(8, 4, dtype, seed)
        powers = torch.exp2(random.float().log2().round()).to(dtype)
        equal = random[:1, :1].expand(8, 4).contiguous()
        for weights in (random, powers, equal, random * 2.5, torch.zeros_like(random)):
            output = reinterpreted(weights)
            output.gemm2_permuted = output.gemm2_permuted.to(activation)
            assert check(output, expected) == []


def test_tiny_float16_weights_are_legal() -> None:
    """float16 has so little range that small probabilities are subnormal; the other dtypes are not like that."""
    output = triple(torch.float16)
    output.expert_weights.fill_(2.0**-20)
    assert check(output, expectation(dtype=torch.float16, weights_dtype=torch.float16)) == []


def test_values_of_a_broken_field_are_not_read() -> None:
    """A later tier does not blame what an earlier one found: the same fault would be reported twice."""
    output = with_entries(triple(), (0, 0, 99))
    output.expanded_idx_to_permuted_idx = output.expanded_idx_to_permuted_idx.long()
    assert only(check(output, expectation())).clause == "MAP-1"
    rows_broken = replace(with_entries(triple(), (0, 0, -7)), gemm2_permuted=lattice(NUM_ROWS, 8))
    assert [violation.clause for violation in check(rows_broken, expectation())] == ["ROWS-4", "MAP-2"]


def test_metadata_tier_reads_no_values() -> None:
    """With tier="metadata" a stray entry is not seen: nothing was read."""
    assert check(with_entries(triple(), (0, 0, 99)), expectation(), tier="metadata") == []


def test_tensors_without_data_are_said_to_have_none() -> None:
    """On the meta device the metadata is right and there are no values to check."""
    good = triple()
    output = UnfinalizedMoEOutput(
        good.gemm2_permuted.to("meta"), good.expert_weights.to("meta"), good.expanded_idx_to_permuted_idx.to("meta")
    )
    meta = expectation(device=torch.device("meta"))
    assert check(output, meta, tier="metadata") == []
    violation = only(check(output, meta))
    assert (violation.clause, violation.field) == ("OUT-3", MAP) and "no values" in violation.got


def test_require_raises_with_every_violation() -> None:
    """The exception carries the records and reads as one line each."""
    require(triple(), expectation())
    output = with_entries(triple(), (2, 1, 99))
    output.expert_weights[0, 0] = float("nan")
    with pytest.raises(ContractViolation) as caught:
        require(output, expectation(rank=3))
    assert [violation.clause for violation in caught.value.violations] == ["MAP-2", "WGT-3"]
    first, _second = str(caught.value).splitlines()
    assert first == f"MAP-2: {MAP} at rank 3, token 2, slot 1: got 99, expected -1 or a row in [0, 20)"
