"""A correct tail of profile C in as few lines as possible, each step a method that a fault replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from moe_conformance.faults.model import Fault, Planted, Variant, family_of, name_of, sentence_of
from moe_contract import (
    ConsumerDeclaration,
    MoEOutput,
    QuantRecipe,
    RankGroup,
    Tail,
    TailCapacity,
    TailOutput,
    UnfinalizedMoEOutput,
)
from moe_contract.call_checks import require_call
from moe_contract.limits import require_capacity

DECLARED: dict[str, Any] = {"weights_dtypes": frozenset({"activation", "float32"}), "route_major": True}
"""What the plain tail declares beyond the defaults."""


def sum_rounded_at_each(parts: list[Tensor]) -> Tensor:
    """The ranks' parts ``[T, H]`` of a 16-bit dtype added one by one, rounded to it after each; float32."""
    return sum(parts[1:], parts[0]).float()


@dataclass
class PlainTail:
    """Profile C: float32 within a rank, one rounding to publish, ranks summed in float32, one rounding of the residual.

    ``declares`` of a subclass replaces fields of the declaration.
    """

    group: RankGroup
    capacity: TailCapacity
    declaration: ConsumerDeclaration
    calls: int = 0
    """Calls so far, this one included."""
    kept: dict[str, Any] = field(default_factory=dict)
    """What a wrong tail keeps from call to call."""
    declares: ClassVar[dict[str, Any]] = {}

    def __call__(
        self,
        output: MoEOutput,
        residual: Tensor,
        norm_weight: Tensor,
        *,
        eps: float,
        weight_bias: float = 0.0,
        quant: QuantRecipe | None = None,
    ) -> TailOutput:
        """One call; ``quant`` is not declared, so it never comes."""
        self.check(output, residual)
        self.calls += 1
        total = self.reduce(self.publish(self.local(output), residual.dtype))
        residual_out = self.add_residual(total, residual)
        return TailOutput(residual_out, self.normed(residual_out, norm_weight, weight_bias, eps))

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        """Refuses what is too large or breaks the contract's metadata clauses."""
        require_call(self.declaration, self.capacity, output, residual.shape[0])

    def local(self, output: MoEOutput) -> Tensor:
        """``[T, H]`` float32: scaled top-k sum plus the shared output."""
        scaled = self.scale(self.routed(output), output.routed_scaling_factor)
        return scaled if output.shared_output is None else self.add_shared(scaled, output)

    def routed(self, output: MoEOutput) -> Tensor:
        """``[T, H]`` float32 before the scale."""
        routed = output.routed
        return self.finalized(routed) if isinstance(routed, Tensor) else self.top_k_sum(routed)

    def finalized(self, routed: Tensor) -> Tensor:
        """A routed part that came finalized."""
        return routed.float()

    def top_k_sum(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """The weighted sum over slots."""
        return self.add_terms(self.terms(routed))

    def terms(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """``[T, K, H]`` float32 weight x row, +0 where absent."""
        index = routed.expanded_idx_to_permuted_idx.long()
        if not routed.gemm2_permuted.shape[0]:
            return torch.zeros(*index.shape, routed.gemm2_permuted.shape[1])
        products = self.rows(routed, index) * self.weights(routed).unsqueeze(-1)
        return torch.where((index >= 0).unsqueeze(-1), products, 0.0)

    def rows(self, routed: UnfinalizedMoEOutput, index: Tensor) -> Tensor:
        """``[T, K, H]`` float32; any row where absent."""
        return routed.gemm2_permuted[index.clamp(min=0)].float()

    def weights(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """``[T, K]`` float32."""
        return routed.expert_weights.float()

    def add_terms(self, terms: Tensor) -> Tensor:
        """The sum over slots, in slot order."""
        total = torch.zeros_like(terms[:, 0])
        for slot in range(terms.shape[1]):
            total = total + terms[:, slot]
        return total

    def scale(self, routed: Tensor, factor: float) -> Tensor:
        """The routed scaling factor, once."""
        return routed * factor

    def add_shared(self, scaled: Tensor, output: MoEOutput) -> Tensor:
        """The shared output, once."""
        assert output.shared_output is not None
        return scaled + output.shared_output.float()

    def publish(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """What the other ranks get of this one."""
        return local.to(dtype)

    def parts(self, local: Tensor) -> list[Tensor]:
        """Every rank's contribution, in rank order."""
        return [local] if self.group.size == 1 else self.group.all_gather(local)

    def reduce(self, local: Tensor) -> Tensor:
        """``[T, H]`` float32: the sum over ranks, in rank order."""
        return self.add_ranks([part.float() for part in self.parts(local)])

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """Added one after the other."""
        return sum(parts[1:], parts[0])

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """The residual, once, and one rounding."""
        return (total + residual.float()).to(residual.dtype)

    def normed(self, x: Tensor, norm_weight: Tensor, weight_bias: float, eps: float) -> Tensor:
        """RMSNorm of the rounded residual."""
        return self.norm(x, self.gain(norm_weight, weight_bias), eps)

    def gain(self, norm_weight: Tensor, weight_bias: float) -> Tensor:
        """What multiplies the normed row."""
        return norm_weight.float() + weight_bias

    def mean_square(self, x: Tensor) -> Tensor:
        """``[T, 1]`` float32."""
        return x.float().square().mean(-1, keepdim=True)

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """``[T, H]`` in the dtype of ``x``."""
        return (x.float() * torch.rsqrt(self.mean_square(x) + eps) * gain).to(x.dtype)

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True)
class PlainConsumer:
    """Opens one kind of tail."""

    tail: type[PlainTail]

    @cached_property
    def declaration(self) -> ConsumerDeclaration:
        """The plain tail's, with what the kind declares."""
        return ConsumerDeclaration(**{"name": name_of(self.tail), **DECLARED, **self.tail.declares})

    def open(self, group: RankGroup, capacity: TailCapacity) -> Tail:
        """A tail; UnsupportedError beyond the declared limits."""
        opening = getattr(self.tail, "may_open", None)
        if opening is None or not opening(group, capacity):
            require_capacity(self.declaration, group, capacity)
        return self.tail(group, capacity, self.declaration)


T = TypeVar("T", bound=type[PlainTail])


def consumer_fault(
    clause: str, *, into: list[Fault], smallest: str = "", bugs: tuple[str, ...] = (), needs: str = ""
) -> Callable[[T], T]:
    """Registers a wrong subclass of PlainTail; its name is the fault's id, its docstring the sentence."""

    def register(tail: T) -> T:
        planted = Planted(consumer=PlainConsumer(tail))
        into.append(
            Fault(name_of(tail), clause, sentence_of(tail), "consumer", family_of(tail), lambda: planted,
                  smallest, bugs, needs)
        )  # fmt: skip
        return tail

    return register


def right_tail(into: list[Variant]) -> Callable[[T], T]:
    """Registers a subclass of PlainTail that is as right as PlainTail."""

    def register(tail: T) -> T:
        planted = Planted(consumer=PlainConsumer(tail))
        into.append(Variant(name_of(tail), sentence_of(tail), family_of(tail), lambda: planted))
        return tail

    return register
