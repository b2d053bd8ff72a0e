"""torch.compile(fullgraph=True) of the reference tail on one rank gives the bits of eager mode (GRAPH-2)."""

from __future__ import annotations

import pytest
import torch

from moe_backends.reference.consumer import PROFILE_A, PROFILE_B, PROFILE_C, ReferenceConsumer
from moe_contract import ConsumerDeclaration, MoEOutput, QuantFormat, QuantRecipe, TailCapacity

from .thread_group import lattice_output, thread_groups

TOKENS, TOP_K, HIDDEN = 5, 3, 32


EVERY_PROFILE_AND_FORMAT = list(zip((PROFILE_A, PROFILE_B, PROFILE_C, PROFILE_C), (None, *QuantFormat), strict=True))


@pytest.mark.parametrize(("declaration", "quant"), EVERY_PROFILE_AND_FORMAT)
def test_compiled_tail_equals_eager(declaration: ConsumerDeclaration, quant: QuantFormat | None) -> None:
    """One graph without a break, right for other data, another T and another scale as well."""
    assert declaration.compilable
    torch.compiler.reset()
    (group,) = thread_groups(1)
    tail = ReferenceConsumer(declaration).open(group, TailCapacity(TOKENS, HIDDEN, TOP_K, torch.bfloat16))
    compiled = torch.compile(tail, fullgraph=True, backend="eager")
    recipe = None if quant is None else QuantRecipe(quant, scale=0.25, global_scale=3.0)
    generator = torch.Generator().manual_seed(0)
    for seed, (num_tokens, scale) in enumerate([(5, 2.0), (3, 2.0), (4, 1.0), (5, 2.5)]):
        output = lattice_output(seed, num_tokens, TOP_K, HIDDEN, torch.bfloat16, scale=scale)
        if seed == 2:
            output = MoEOutput(torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16())
        residual = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
        gamma = torch.randn(HIDDEN, generator=generator)
        got = compiled(output, residual, gamma, eps=1e-6, weight_bias=1.0, quant=recipe)
        expected = tail(output, residual, gamma, eps=1e-6, weight_bias=1.0, quant=recipe)
        for name in ("residual_out", "norm_out", "quant_out", "quant_scale"):
            mine, theirs = getattr(got, name), getattr(expected, name)
            assert (mine is None) == (theirs is None) == (quant is None and name.startswith("quant"))
            if theirs is not None:
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name
