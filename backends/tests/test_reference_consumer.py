"""The reference consumer on the lattice, where every sum is exact and equality is bitwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from moe_backends.reference.consumer import PROFILE_A, PROFILE_B, PROFILE_C, ReferenceConsumer
from moe_contract import (
    ConsumerDeclaration,
    MoEOutput,
    QuantFormat,
    QuantRecipe,
    ScalePlacement,
    TailCapacity,
    TailOutput,
    UnfinalizedMoEOutput,
)

from .thread_group import ThreadGroup, lattice, lattice_output, run_ranks, thread_groups

PROFILES = pytest.mark.parametrize("declaration", [PROFILE_A, PROFILE_B, PROFILE_C], ids=lambda d: d.name)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
TOKENS, TOP_K, HIDDEN = 9, 4, 32
EPS = 1e-6


def exact_contribution(output: MoEOutput) -> Tensor:
    """One rank's contribution in float64, element by element from the definition."""
    routed = output.routed
    if isinstance(routed, Tensor):
        total = routed.double()
    else:
        total = torch.zeros(routed.expert_weights.shape[0], routed.gemm2_permuted.shape[1], dtype=torch.float64)
        for token, slots in enumerate(routed.expanded_idx_to_permuted_idx.tolist()):
            for slot, row in enumerate(slots):
                if row >= 0:
                    weight = routed.expert_weights[token, slot].double()
                    total[token] += weight * routed.gemm2_permuted[row].double()
    total = total * output.routed_scaling_factor
    return total if output.shared_output is None else total + output.shared_output.double()


def run_tail(
    declaration: ConsumerDeclaration,
    outputs: list[MoEOutput],
    residual: Tensor,
    norm_weight: Tensor | None = None,
    quant: QuantRecipe | None = None,
    top_k: int = TOP_K,
) -> list[TailOutput]:
    """One tail call with one output per rank."""
    num_tokens, hidden = residual.shape
    gamma = torch.ones(hidden, dtype=residual.dtype) if norm_weight is None else norm_weight
    capacity = TailCapacity(max(num_tokens, 1), hidden, top_k, residual.dtype)

    def body(group: ThreadGroup) -> TailOutput:
        tail = ReferenceConsumer(declaration).open(group, capacity)
        return tail(outputs[group.rank], residual, gamma, eps=EPS, quant=quant)

    return run_ranks(thread_groups(len(outputs)), body)


def lattice_residual(dtype: torch.dtype, num_tokens: int = TOKENS) -> Tensor:
    """A residual whose sum with any case below is exact."""
    return lattice(torch.Generator().manual_seed(99), (num_tokens, HIDDEN), dtype)


@PROFILES
@DTYPES
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("weights", ["activation", "float32"])
@pytest.mark.parametrize("placement", list(ScalePlacement))
def test_residual_is_the_exact_sum_on_the_lattice(
    declaration: ConsumerDeclaration, dtype: torch.dtype, size: int, weights: str, placement: ScalePlacement
) -> None:
    """Where nothing rounds, every profile, dtype, world size, weights dtype and scale placement gives the exact sum."""
    declaration = declaration.model_copy(update={"scale_placement": placement})
    weights_dtype = torch.float32 if weights == "float32" else dtype
    outputs = [lattice_output(rank, TOKENS, TOP_K, HIDDEN, dtype, weights_dtype) for rank in range(size)]
    residual = lattice_residual(dtype)
    expected = sum((exact_contribution(output) for output in outputs), residual.double())
    assert torch.equal(expected.to(dtype).double(), expected), "the case is not on the lattice"
    for result in run_tail(declaration, outputs, residual):
        assert result.residual_out.dtype == result.norm_out.dtype == dtype
        assert torch.equal(result.residual_out.double(), expected)


@PROFILES
@DTYPES
def test_finalized_routed_part_is_scaled_and_joined(declaration: ConsumerDeclaration, dtype: torch.dtype) -> None:
    """A finalized routed tensor gets the scale, the shared output, the reduction and the residual as a triple does."""
    generator = torch.Generator().manual_seed(5)
    shape = (TOKENS, HIDDEN)
    outputs = [MoEOutput(lattice(generator, shape, dtype), lattice(generator, shape, dtype), 2.5) for _ in range(2)]
    residual = lattice_residual(dtype)
    expected = sum((exact_contribution(output) for output in outputs), residual.double())
    for result in run_tail(declaration, outputs, residual):
        assert torch.equal(result.residual_out.double(), expected)


@PROFILES
def test_each_part_may_be_missing(declaration: ConsumerDeclaration) -> None:
    """No shared output adds nothing, and a scale of 1 changes nothing."""
    output = lattice_output(3, TOKENS, TOP_K, HIDDEN, torch.bfloat16)
    bare = MoEOutput(output.routed)
    residual = lattice_residual(torch.bfloat16)
    expected = exact_contribution(bare) + residual.double()
    (result,) = run_tail(declaration, [bare], residual)
    assert torch.equal(result.residual_out.double(), expected)


def test_objects_of_another_project_are_read_by_attribute() -> None:
    """Objects with the fields of contract 1.0 are read as our own classes; a bare triple or tensor has scale 1."""
    output = lattice_output(4, TOKENS, TOP_K, HIDDEN, torch.bfloat16)
    routed = output.routed
    assert isinstance(routed, UnfinalizedMoEOutput)
    foreign_triple = SimpleNamespace(
        gemm2_permuted=routed.gemm2_permuted,
        expert_weights=routed.expert_weights,
        expanded_idx_to_permuted_idx=routed.expanded_idx_to_permuted_idx,
    )
    foreign = SimpleNamespace(routed=foreign_triple, shared_output=output.shared_output, routed_scaling_factor=2.0)
    residual = lattice_residual(torch.bfloat16)
    for theirs, ours in ((foreign, output), (foreign_triple, MoEOutput(routed)), (residual, MoEOutput(residual))):
        (got,), (expected,) = (run_tail(PROFILE_C, [each], residual) for each in (theirs, ours))
        assert torch.equal(got.residual_out, expected.residual_out)
        assert torch.equal(got.norm_out, expected.norm_out)


@PROFILES
def test_every_rank_ends_with_the_same_bits(declaration: ConsumerDeclaration) -> None:
    """Random data, where every order of summation gives other bits, ends alike on all ranks, quantised bytes too."""
    generator = torch.Generator().manual_seed(0)
    outputs = [MoEOutput(torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16(), None, 1.7) for _ in range(4)]
    residual = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    recipe = QuantRecipe(QuantFormat.NVFP4, global_scale=100.0)
    first, *others = run_tail(declaration, outputs, residual, quant=recipe)
    assert first.quant_out is not None and first.quant_scale is not None
    for other in others:
        assert torch.equal(first.residual_out, other.residual_out)
        assert torch.equal(first.norm_out, other.norm_out)
        assert other.quant_out is not None and torch.equal(first.quant_out, other.quant_out)
        assert other.quant_scale is not None and torch.equal(first.quant_scale, other.quant_scale)


@PROFILES
@pytest.mark.parametrize("finalized", [False, True])
def test_inputs_are_not_written_and_results_are_new(declaration: ConsumerDeclaration, finalized: bool) -> None:
    """No tensor handed to a tail changes, and no result shares memory with one (OUT-4)."""
    output = lattice_output(6, TOKENS, TOP_K, HIDDEN, torch.bfloat16, scale=1.0)
    if finalized:
        output = MoEOutput(lattice_residual(torch.bfloat16))
    residual, gamma = lattice_residual(torch.bfloat16), torch.full((HIDDEN,), 0.5)
    routed = output.routed
    given = [routed] if isinstance(routed, Tensor) else [v for v in vars(routed).values() if isinstance(v, Tensor)]
    given += [residual, gamma] + ([] if output.shared_output is None else [output.shared_output])
    before = [tensor.clone() for tensor in given]
    (result,) = run_tail(declaration, [output], residual, gamma)
    for tensor, copy in zip(given, before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))
    held = {tensor.untyped_storage().data_ptr() for tensor in given}
    assert result.residual_out.untyped_storage().data_ptr() not in held
    assert result.norm_out.untyped_storage().data_ptr() not in held


@PROFILES
@pytest.mark.parametrize("quant", [None, *QuantFormat])
def test_no_tokens_give_empty_results(declaration: ConsumerDeclaration, quant: QuantFormat | None) -> None:
    """T = 0 gives empty tensors of the right width and dtype on every rank."""
    outputs = [MoEOutput(torch.empty(0, HIDDEN, dtype=torch.bfloat16)) for _ in range(2)]
    recipe = None if quant is None else QuantRecipe(quant)
    for result in run_tail(declaration, outputs, torch.empty(0, HIDDEN, dtype=torch.bfloat16), quant=recipe):
        assert result.residual_out.shape == result.norm_out.shape == (0, HIDDEN)
        assert (result.quant_out is None) == (quant is None)
        assert result.quant_out is None or result.quant_out.shape[0] == 0


@pytest.mark.parametrize("size", [1, 2])
def test_collectives_do_not_depend_on_the_data(size: int) -> None:
    """One all-gather for any number of tokens, empty or full maps; none at all for one rank (RED-1, RED-4)."""
    capacity = TailCapacity(TOKENS, HIDDEN, TOP_K, torch.bfloat16)
    seen = []
    for num_tokens, absent in ((0, 0.0), (1, 1.0), (TOKENS, 0.0)):
        groups = thread_groups(size)

        def body(group: ThreadGroup, num_tokens: int = num_tokens, absent: float = absent) -> None:
            tail = ReferenceConsumer(PROFILE_C).open(group, capacity)
            output = lattice_output(group.rank, num_tokens, TOP_K, HIDDEN, torch.bfloat16, absent=absent)
            if num_tokens == 0:
                output = MoEOutput(torch.empty(0, HIDDEN, dtype=torch.bfloat16))
            tail(output, lattice_residual(torch.bfloat16, num_tokens), torch.ones(HIDDEN), eps=EPS)

        run_ranks(groups, body)
        seen.append([group.collectives for group in groups])
    expected = [["all_gather"] if size > 1 else []] * size
    assert seen == [expected] * 3


def test_norm_weight_may_be_a_parameter() -> None:
    """A model's norm weight requires grad; the tail accepts it and records no gradient."""
    gamma = torch.nn.Parameter(torch.ones(HIDDEN))
    (result,) = run_tail(
        PROFILE_C, [MoEOutput(lattice_residual(torch.bfloat16))], lattice_residual(torch.bfloat16), gamma
    )
    assert not result.norm_out.requires_grad
