"""The reference completion: exact on the lattice, blind to what no route names, clear about nonsense."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_contract import (
    ContractViolation,
    MoEOutput,
    PendingOutputError,
    UnfinalizedMoEOutput,
    complete,
    complete_expert_parallel,
    finalize,
    require_tensor,
)

from .lattice import H, K, LonelyGroup, T, assert_bitwise, exact_sum, lattice, layered, route_major_triple, triple

NAN = float("nan")


def with_absent(output: UnfinalizedMoEOutput, *places: tuple[int, int]) -> UnfinalizedMoEOutput:
    """A copy in which these (token, slot) are -1 and their weight is NaN."""
    mapped, weights = output.expanded_idx_to_permuted_idx.clone(), output.expert_weights.clone()
    for token, slot in places:
        mapped[token, slot], weights[token, slot] = -1, NAN
    return replace(output, expanded_idx_to_permuted_idx=mapped, expert_weights=weights)


def poisoned(output: UnfinalizedMoEOutput) -> UnfinalizedMoEOutput:
    """A copy whose rows are NaN wherever no map entry names them."""
    rows = torch.full_like(output.gemm2_permuted, NAN)
    named = output.expanded_idx_to_permuted_idx.flatten()
    named = named[named >= 0].long()
    rows[named] = output.gemm2_permuted[named]
    return replace(output, gemm2_permuted=rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights_dtype", [None, torch.float32])
def test_finalize_is_exact_on_the_lattice(dtype: torch.dtype, weights_dtype: torch.dtype | None) -> None:
    """Sum, scale and shared output in the activation dtype, whichever dtype the weights have."""
    output, shared = triple(dtype, weights_dtype), lattice(T, H, seed=5, dtype=dtype)
    result = finalize(output, routed_scaling_factor=2.0, shared_output=shared)
    assert result.dtype == dtype
    assert_bitwise(result, exact_sum(output, 2.0, shared))


def test_finalize_rounds_once() -> None:
    """A large term and seven below half an ulp: the small ones survive a float32 sum, not a bf16 one."""
    rows = torch.full((8, H), 2.0**-9, dtype=torch.bfloat16)
    rows[0] = 1.0
    output = UnfinalizedMoEOutput(
        rows, torch.ones(1, 8, dtype=torch.bfloat16), torch.arange(8, dtype=torch.int32).reshape(1, 8)
    )
    expected = torch.tensor(1 + 7 * 2.0**-9, dtype=torch.float32).to(torch.bfloat16)
    assert float(expected) > 1.0
    assert torch.equal(finalize(output), expected.expand(1, H))


def test_products_are_not_rounded() -> None:
    """(1 + 2^-7)^2 - 1 - 2^-6 is 2^-14 exactly; a product rounded to bf16 would leave nothing."""
    rows = torch.tensor([1 + 2.0**-7, -1.0, -1.0], dtype=torch.bfloat16)[:, None].expand(3, H).contiguous()
    weights = torch.tensor([[1 + 2.0**-7, 1.0, 2.0**-6]], dtype=torch.bfloat16)
    output = UnfinalizedMoEOutput(rows, weights, torch.arange(3, dtype=torch.int32).reshape(1, 3))
    assert torch.equal(finalize(output), torch.full((1, H), 2.0**-14, dtype=torch.bfloat16))


def test_row_that_no_entry_names_never_reaches_the_result() -> None:
    """NaN in every unreferenced row, row 0 included, changes nothing."""
    output = triple()
    assert_bitwise(finalize(poisoned(output)), exact_sum(output))


def test_absent_slot_contributes_nothing() -> None:
    """-1 adds +0 even when its weight and row 0 are NaN."""
    row_zero = (triple().expanded_idx_to_permuted_idx == 0).nonzero().tolist()
    output = poisoned(with_absent(triple(), (0, 1), (2, 0), *map(tuple, row_zero)))
    assert bool(output.gemm2_permuted[0].isnan().all())
    assert_bitwise(finalize(output), exact_sum(output))


def test_token_without_experts_gets_the_shared_output_alone() -> None:
    """All slots of one token absent, then all slots of all tokens, rows all NaN."""
    shared = lattice(T, H, seed=6)
    one = poisoned(with_absent(triple(), *((1, slot) for slot in range(K))))
    assert torch.equal(finalize(one, routed_scaling_factor=2.0, shared_output=shared)[1], shared[1])
    none = poisoned(with_absent(triple(), *((token, slot) for token in range(T) for slot in range(K))))
    assert torch.equal(finalize(none, shared_output=shared), shared)
    result = finalize(none)
    assert torch.equal(result, torch.zeros(T, H, dtype=torch.bfloat16)) and not bool(result.signbit().any())


def test_rank_without_any_row_is_completed() -> None:
    """P may be 0 where no expert of this rank was chosen."""
    empty = with_absent(triple(), *((token, slot) for token in range(T) for slot in range(K)))
    empty.gemm2_permuted = empty.gemm2_permuted[:0]
    assert torch.equal(finalize(empty), torch.zeros(T, H, dtype=torch.bfloat16))


def test_nan_in_a_referenced_row_propagates() -> None:
    """What a route names is part of the result, NaN included, and of no other token's."""
    output = triple()
    output.gemm2_permuted[int(output.expanded_idx_to_permuted_idx[2, 1])] = NAN
    assert finalize(output).isnan().any(dim=1).tolist() == [False, False, True, False]


def test_route_major_output_needs_no_special_case() -> None:
    """Its map is a map like any other."""
    output = route_major_triple()
    assert_bitwise(finalize(output), exact_sum(output))


def test_no_token_gives_the_empty_tensor() -> None:
    """T = 0, finalized or not."""
    empty = UnfinalizedMoEOutput(
        lattice(3, H), torch.ones(0, K, dtype=torch.bfloat16), torch.zeros(0, K, dtype=torch.int32)
    )
    for output in (empty, lattice(0, H)):
        result = finalize(output, routed_scaling_factor=2.0, shared_output=lattice(0, H))
        assert result.shape == (0, H) and result.dtype == torch.bfloat16


def test_finalized_tensor_is_scaled_and_added_to() -> None:
    """A kernel that finalized leaves scale and shared output to the completion."""
    routed, shared = lattice(T, H, seed=8), lattice(T, H, seed=9)
    assert_bitwise(finalize(routed, routed_scaling_factor=2.0, shared_output=shared), 2 * routed.double() + shared)
    assert torch.equal(finalize(routed), routed)


def test_completion_writes_nothing_it_was_given() -> None:
    """Rows, weights, map and shared output hold the same bits afterwards."""
    output = layered()
    assert isinstance(output.routed, UnfinalizedMoEOutput) and output.shared_output is not None
    routed = output.routed
    given = [
        routed.gemm2_permuted,
        routed.expert_weights,
        routed.expanded_idx_to_permuted_idx,
        output.shared_output,
    ]
    copies = [tensor.clone() for tensor in given]
    complete(output)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, copies, strict=True))


def test_complete_finishes_every_form() -> None:
    """A layer's output with its scale and shared part, a bare triple, a bare tensor."""
    output = layered()
    assert_bitwise(complete(output), exact_sum(triple(), 2.0, output.shared_output))
    assert_bitwise(complete(triple()), exact_sum(triple()))
    assert torch.equal(complete(lattice(T, H)), lattice(T, H))


@pytest.mark.parametrize("output", [layered(), triple(), lattice(T, H)], ids=["layered", "triple", "tensor"])
def test_complete_reduces_exactly_once(output: MoEOutput | UnfinalizedMoEOutput) -> None:
    """With a group the sum over its ranks is taken once, after finalizing, whatever the form."""
    group = LonelyGroup(size=4)
    assert_bitwise(complete(output, group), 4 * complete(output).double())
    assert group.reductions == 1


def test_expert_parallel_outputs_add_up_to_the_whole() -> None:
    """Split over three ranks by slot, each with its shared part, the sum is the undivided layer's."""
    shared = [lattice(T, H, seed=30 + rank) for rank in range(3)]
    outputs = []
    for rank in range(3):
        elsewhere = [(token, slot) for token in range(T) for slot in range(K) if slot != rank]
        outputs.append(MoEOutput(poisoned(with_absent(triple(), *elsewhere)), shared[rank], 2.0))
    exact = exact_sum(triple(), 2.0) + sum(part.double() for part in shared)
    assert_bitwise(complete_expert_parallel(outputs), exact)


def test_expert_parallel_sum_rounds_once() -> None:
    """Contributions below half an ulp of the first rank's survive, since ranks are summed in float32."""
    ranks = [torch.ones(1, H, dtype=torch.bfloat16)] + [torch.full((1, H), 2.0**-9, dtype=torch.bfloat16)] * 4
    assert torch.equal(complete_expert_parallel(ranks), torch.full((1, H), 1 + 2.0**-7, dtype=torch.bfloat16))


def test_expert_parallel_outputs_must_belong_together() -> None:
    """No ranks, or ranks of different shapes or dtypes, are refused with the rank named."""
    with pytest.raises(ValueError, match="output of every rank of the group, got none"):
        complete_expert_parallel([])
    for other in (lattice(T + 1, H), lattice(T, H).half()):
        with pytest.raises(ContractViolation, match=r"OUT-1: routed at rank 1: got .* as on rank 0"):
            complete_expert_parallel([lattice(T, H), other])


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        (None, "OUT-1: output: got NoneType"),
        ("text", "OUT-1: output: got str"),
        ([triple()], "OUT-1: output: got list"),
        (MoEOutput(None), "OUT-1: routed: got NoneType"),
        (MoEOutput(layered()), "OUT-1: routed: got MoEOutput"),
        (lattice(T * H), r"OUT-1: routed: got shape \[64\], expected \[T, H\]"),
        (replace(triple(), gemm2_permuted=[1.0]), "OUT-1: gemm2_permuted: got list"),
        (replace(triple(), gemm2_permuted=lattice(2, 3, H)), r"ROWS-1: gemm2_permuted: got shape \[2, 3, 16\]"),
        (replace(triple(), expert_weights=torch.ones(K, T)), r"WGT-1: .*got shape \[3, 4\].*slot for slot"),
        (
            replace(triple(), expanded_idx_to_permuted_idx=torch.zeros(T * K, dtype=torch.int32)),
            r"MAP-1: expanded_idx_to_permuted_idx: got shape \[12\], expected \[T, K\]",
        ),
        (MoEOutput(triple(), lattice(1, H)), r"SHARED-1: shared_output: got shape \[1, 16\]"),
        (MoEOutput(triple(), 3.0), "SHARED-1: shared_output: got float"),
        (MoEOutput(triple(), None, None), "OUT-1: routed_scaling_factor: got NoneType"),
    ],
)
def test_what_cannot_be_completed_is_named(spoiled: object, message: str) -> None:
    """Nonsense, and shapes that torch would broadcast, are refused with clause and field."""
    with pytest.raises(ContractViolation, match=message):
        complete(spoiled)


def test_stray_row_is_not_read() -> None:
    """A map entry past the last row stops the completion instead of reading another row."""
    output = triple()
    output.expanded_idx_to_permuted_idx[0, 0] = 10_000
    with pytest.raises(IndexError):
        finalize(output)


def test_row_offsets_past_32_bits_are_addressed() -> None:
    """Rows whose element offset passes 2^31 are read where they are (MAP-6); untouched rows cost no memory."""
    hidden, last = 7168, 299_594
    assert last * hidden > 2**31
    rows = torch.empty(last + 1, hidden, dtype=torch.bfloat16)
    rows[last], rows[last - 1], rows[1] = 3.0, 2.0, 1.0
    mapped = torch.tensor([[last, 1], [-1, last - 1]], dtype=torch.int32)
    result = finalize(UnfinalizedMoEOutput(rows, torch.ones(2, 2, dtype=torch.bfloat16), mapped))
    assert torch.equal(result, torch.tensor([[4.0], [2.0]], dtype=torch.bfloat16).expand(2, hidden))


def test_callers_that_take_tensors_only_are_told_what_to_do() -> None:
    """require_tensor passes a tensor through and names the way out for anything pending."""
    tensor = lattice(T, H)
    assert require_tensor(tensor) is tensor
    for pending in (triple(), layered()):
        with pytest.raises(PendingOutputError, match=r"DEFER-6: .*moe_contract\.complete\(output, group\)"):
            require_tensor(pending)
    with pytest.raises(PendingOutputError, match=r"OUT-1: expected a finalized .* got NoneType"):
        require_tensor(None)
