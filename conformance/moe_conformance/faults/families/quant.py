"""QUANT: bytes and scales that are not the recipe's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from moe_conformance.faults.bases import base_consumer
from moe_conformance.faults.model import Fault, Planted, family_of, name_of, sentence_of
from moe_contract import ConsumerDeclaration, MoEOutput, QuantFormat, QuantRecipe, RankGroup, Tail, TailCapacity
from moe_contract import TailOutput as Output

FAULTS: list[Fault] = []
Delta = Callable[[Output, QuantRecipe], Output]


@dataclass(frozen=True)
class _Tail:
    right: Tail
    delta: Delta

    def __call__(
        self, output: MoEOutput, residual: Tensor, norm_weight: Tensor, *, eps: float, weight_bias: float = 0.0,
        quant: QuantRecipe | None = None,
    ) -> Output:  # fmt: skip
        result = self.right(output, residual, norm_weight, eps=eps, weight_bias=weight_bias, quant=quant)
        return result if quant is None else self.delta(result, quant)

    def close(self) -> None:
        self.right.close()


@dataclass(frozen=True)
class _Consumer:
    """The reference, whose quantised output is changed."""

    delta: Delta

    @cached_property
    def declaration(self) -> ConsumerDeclaration:
        return base_consumer("reference").declaration.model_copy(update={"name": name_of(self.delta)})

    def open(self, group: RankGroup, capacity: TailCapacity) -> Tail:
        return _Tail(base_consumer("reference").open(group, capacity), self.delta)


def quant_fault(*, smallest: str = "", bugs: tuple[str, ...] = ()) -> Callable[[Delta], Delta]:
    """Registers a delta of a quantised output."""

    def register(delta: Delta) -> Delta:
        planted = Planted(consumer=_Consumer(delta))
        FAULTS.append(
            Fault(name_of(delta), "QUANT-1", sentence_of(delta), "consumer", family_of(delta), lambda: planted,
                  smallest, bugs)
        )  # fmt: skip
        return delta

    return register


def _codes(output: Output) -> Tensor:
    assert output.quant_out is not None
    return output.quant_out


def _scales(output: Output) -> Tensor:
    assert output.quant_scale is not None
    return output.quant_scale


@quant_fault(bugs=("TensorRT-LLM#14668",), smallest="the last token")
def last_token_quantised_before_it_is_there(output: Output, recipe: QuantRecipe) -> Output:
    """The last token's codes are those of zeros."""
    codes = _codes(output).clone()
    codes.view(torch.uint8)[-1:] = 0
    return replace(output, quant_out=codes)


@quant_fault(smallest="any code off a tie")
def codes_truncated(output: Output, recipe: QuantRecipe) -> Output:
    """Codes are rounded towards zero: some are one less than the nearest."""
    if recipe.format is QuantFormat.NVFP4:
        return output
    value = output.norm_out.float() / _scales(output).float()
    codes = _codes(output).clone()
    beyond = codes.float().abs() > value.abs()
    codes.view(torch.uint8)[beyond] -= 1
    return replace(output, quant_out=codes)


@quant_fault(smallest="nvfp4, two elements")
def nibbles_swapped(output: Output, recipe: QuantRecipe) -> Output:
    """Even elements are in the high nibble."""
    if recipe.format is not QuantFormat.NVFP4:
        return output
    codes = _codes(output)
    return replace(output, quant_out=((codes >> 4) | (codes << 4)).to(torch.uint8))


@quant_fault(smallest="nvfp4, swizzled, T=1")
def padding_of_the_scales_unwritten(output: Output, recipe: QuantRecipe) -> Output:
    """Bytes outside the logical scales are whatever was there."""
    if recipe.format is not QuantFormat.NVFP4 or recipe.scale_layout != "swizzled":
        return output
    scales = _scales(output).clone()
    scales.view(-1)[scales.view(-1) == 0] = 0x38
    return replace(output, quant_scale=scales)


@quant_fault(smallest="two tokens of different size")
def one_scale_for_all_tokens(output: Output, recipe: QuantRecipe) -> Output:
    """The per-token scale is the largest token's."""
    if recipe.format is not QuantFormat.FP8_PER_TOKEN:
        return output
    scale = _scales(output).amax().expand_as(_scales(output)).contiguous()
    codes = (output.norm_out.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return replace(output, quant_out=codes, quant_scale=scale)


@quant_fault(smallest="fp8 static")
def scale_returned_inverted(output: Output, recipe: QuantRecipe) -> Output:
    """The scale tensor holds the quantisation factor, not the dequantisation one."""
    if recipe.format is not QuantFormat.FP8_STATIC:
        return output
    return replace(output, quant_scale=1.0 / _scales(output))
