"""Consumers that are wrong in one line each: a plain fp32 tail whose steps are replaced one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_contract import ConsumerDeclaration, MoEOutput, RankGroup, Tail, TailCapacity, TailOutput, UnfinalizedMoEOutput
from moe_contract.backend import UnsupportedError
from moe_contract.checks import Expectation, require
from moe_contract.limits import capacity_beyond


@dataclass
class PlainTail:
    """A correct tail of profile C in as few lines as possible; each step is a method that a wrong one replaces."""

    group: RankGroup
    capacity: TailCapacity
    declaration: ConsumerDeclaration
    calls: int = 0

    def __call__(
        self,
        output: MoEOutput,
        residual: Tensor,
        norm_weight: Tensor,
        *,
        eps: float,
        weight_bias: float = 0.0,
        quant: Any = None,
    ) -> TailOutput:
        """One call, step by step."""
        self.check(output, residual)
        self.calls += 1
        local = self.local(output).to(residual.dtype)
        total = self.reduce(local)
        residual_out = self.add_residual(total, residual)
        return TailOutput(residual_out, self.norm(residual_out, norm_weight.float() + weight_bias, eps))

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        """Refuses what the tail was not opened for, and metadata that break the contract."""
        tokens, capacity = residual.shape[0], self.capacity
        if tokens > capacity.max_tokens:
            raise UnsupportedError(f"CAP-1: {tokens} tokens, capacity {capacity.max_tokens}")
        expectation = Expectation(tokens, capacity.top_k, capacity.hidden_size, capacity.dtype, capacity.dtype)
        require(output, expectation, tier="metadata")

    def local(self, output: MoEOutput) -> Tensor:
        """``[T, H]`` float32: this rank's part before it is published."""
        scaled = self.scale(self.routed(output), output.routed_scaling_factor)
        return scaled if output.shared_output is None else self.add_shared(scaled, output)

    def routed(self, output: MoEOutput) -> Tensor:
        """``[T, H]`` float32: the routed part, not scaled."""
        if isinstance(output.routed, Tensor):
            return output.routed.float()
        return self.top_k_sum(output.routed)

    def top_k_sum(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """``[T, H]`` float32: the weighted sum over the slots that are not -1."""
        index = routed.expanded_idx_to_permuted_idx.long()
        if not routed.gemm2_permuted.shape[0]:
            return torch.zeros(index.shape[0], routed.gemm2_permuted.shape[1])
        terms = self.rows(routed, index) * routed.expert_weights.float().unsqueeze(-1)
        return torch.where((index >= 0).unsqueeze(-1), terms, 0.0).sum(1)

    def rows(self, routed: UnfinalizedMoEOutput, index: Tensor) -> Tensor:
        """``[T, K, H]`` float32: each slot's row; any row where the slot is -1."""
        return routed.gemm2_permuted[index.clamp(min=0)].float()

    def scale(self, routed: Tensor, factor: float) -> Tensor:
        """The routed part times the factor that is left to the consumer."""
        return routed * factor

    def add_shared(self, scaled: Tensor, output: MoEOutput) -> Tensor:
        """The scaled part plus this rank's shared output."""
        assert output.shared_output is not None
        return scaled + output.shared_output.float()

    def reduce(self, local: Tensor) -> Tensor:
        """``[T, H]`` float32: the sum of what the ranks published."""
        parts = [local] if self.group.size == 1 else self.group.all_gather(local)
        return torch.stack([part.float() for part in parts]).sum(0)

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """``residual_out`` in the activation dtype."""
        return (total + residual.float()).to(residual.dtype)

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """``norm_out`` of the rounded residual, in the activation dtype."""
        square = x.float().square().mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(square + eps) * gain).to(x.dtype)

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True)
class PlainConsumer:
    """Opens one kind of tail."""

    tail: type[PlainTail]

    @property
    def declaration(self) -> ConsumerDeclaration:
        """Every default; the name is the tail's."""
        return ConsumerDeclaration(name=self.tail.__name__)

    def open(self, group: RankGroup, capacity: TailCapacity) -> Tail:
        """The tail, unless group or capacity lie outside the declaration."""
        for reason in capacity_beyond(self.declaration, group, capacity):
            raise UnsupportedError(reason)
        return self.tail(group, capacity, self.declaration)


DENSE_ROWS = 10_000
"""Rows above which a dense combine takes longer than a case may."""


class RoundsAtEachRank(PlainTail):
    """Profile C is declared, but the sum over ranks is rounded as B's is."""

    def reduce(self, local: Tensor) -> Tensor:
        first, *others = [local] if self.group.size == 1 else self.group.all_gather(local)
        return sum(others, first).float()


class LastRowRead(PlainTail):
    """-1 indexes the last row, as Python does."""

    def top_k_sum(self, routed: UnfinalizedMoEOutput) -> Tensor:
        rows = routed.gemm2_permuted[routed.expanded_idx_to_permuted_idx.long()].float()
        return (rows * routed.expert_weights.float().unsqueeze(-1)).sum(1)


class AbsentTimesZero(PlainTail):
    """-1 reads row 0 with weight 0: NaN there survives."""

    def top_k_sum(self, routed: UnfinalizedMoEOutput) -> Tensor:
        index = routed.expanded_idx_to_permuted_idx.long()
        weights = torch.where(index >= 0, routed.expert_weights.float(), 0.0)
        return (routed.gemm2_permuted[index.clamp(min=0)].float() * weights.unsqueeze(-1)).sum(1)


class DenseCombine(PlainTail):
    """A [T, P] matrix of weights times all rows: an unreferenced NaN row times 0 is NaN."""

    def top_k_sum(self, routed: UnfinalizedMoEOutput) -> Tensor:
        index = routed.expanded_idx_to_permuted_idx.long()
        if routed.gemm2_permuted.shape[0] > DENSE_ROWS:
            return super().top_k_sum(routed)
        matrix = torch.zeros(index.shape[0], routed.gemm2_permuted.shape[0] + 1)
        matrix.scatter_add_(1, torch.where(index >= 0, index, matrix.shape[1] - 1), routed.expert_weights.float())
        return matrix[:, :-1] @ routed.gemm2_permuted.float()


class FlatMapTaken(PlainTail):
    """Takes a map in whichever shape and reads it as [T, K]."""

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        if residual.shape[0] > self.capacity.max_tokens or residual.device.type == "meta":
            raise UnsupportedError("CAP: not for this tail")
        routed = output.routed
        if not isinstance(routed, Tensor):
            if routed.gemm2_permuted.shape[1] != residual.shape[1] or routed.expert_weights.dtype != residual.dtype:
                raise ValueError("not what was declared")
            index = routed.expanded_idx_to_permuted_idx
            routed.expanded_idx_to_permuted_idx = index.reshape(residual.shape[0], -1)


class Float32ReadAsActivation(PlainTail):
    """Takes float32 weights, reads their bytes as the activation dtype."""

    def check(self, output: MoEOutput, residual: Tensor) -> None:
        routed = output.routed
        if not isinstance(routed, Tensor) and routed.expert_weights.dtype == torch.float32:
            shape = routed.expert_weights.shape
            half = routed.expert_weights.contiguous().view(residual.dtype).reshape(-1)[: shape[0] * shape[1]]
            routed.expert_weights = half.reshape(shape)
        super().check(output, residual)


class SharedScaled(PlainTail):
    """The scale multiplies the sum after the shared output was added."""

    def local(self, output: MoEOutput) -> Tensor:
        routed = self.routed(output)
        if output.shared_output is not None:
            routed = routed + output.shared_output.float()
        return routed * output.routed_scaling_factor


class ScaleTwice(PlainTail):
    """The scale is applied to the weights and to the sum."""

    def scale(self, routed: Tensor, factor: float) -> Tensor:
        return routed * factor * factor


class ScaleForgotten(PlainTail):
    """The scale is left to a producer that did not fold it."""

    def scale(self, routed: Tensor, factor: float) -> Tensor:
        return routed


class RankMissing(PlainTail):
    """The last rank's part is not summed."""

    def reduce(self, local: Tensor) -> Tensor:
        parts = [local] if self.group.size == 1 else self.group.all_gather(local)
        return torch.stack([part.float() for part in parts[: max(1, len(parts) - 1)]]).sum(0)


class OwnDataTwice(PlainTail):
    """A rank adds its own part again."""

    def reduce(self, local: Tensor) -> Tensor:
        total = super().reduce(local)
        return total if self.group.size == 1 else total + local.float()


class SharedAddedAfterReduction(PlainTail):
    """Each rank adds every rank's shared output again after the reduction."""

    def local(self, output: MoEOutput) -> Tensor:
        local = super().local(output)
        return local if output.shared_output is None else local + output.shared_output.float()


class ResidualOnEveryRank(PlainTail):
    """The residual is added before the reduction, once a rank."""

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        return (total + self.group.size * residual.float()).to(residual.dtype)


class NormOverPaddedWidth(PlainTail):
    """The mean square is taken over a width padded to a multiple of 384."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        padded = -(-x.shape[1] // 384) * 384 + 384
        square = x.float().square().sum(-1, keepdim=True) / padded
        return (x.float() * torch.rsqrt(square + eps) * gain).to(x.dtype)


class EpsOutsideTheRoot(PlainTail):
    """eps is added to the root, not to the mean square."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        root = x.float().square().mean(-1, keepdim=True).sqrt() + eps
        return (x.float() / root * gain).to(x.dtype)


class ResidualOverwritten(PlainTail):
    """The residual that was handed over is used as the output buffer."""

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        return residual.copy_(total + residual.float())


class StaleAtSecondCall(PlainTail):
    """From the second call on, a buffer of the first is summed again where T shrank."""

    stale: Tensor | None = None

    def reduce(self, local: Tensor) -> Tensor:
        total = super().reduce(local)
        if self.stale is not None and self.stale.shape[0] > total.shape[0]:
            total = total + self.stale[: total.shape[0]]
        self.stale = total
        return total


WRONG_CONSUMERS: dict[type[PlainTail], str] = {
    LastRowRead: "MAP-4",
    AbsentTimesZero: "MAP-4",
    DenseCombine: "ROWS-2",
    FlatMapTaken: "MAP-1",
    Float32ReadAsActivation: "WGT-2",
    SharedScaled: "SHARED-2",
    ScaleTwice: "SCALE-1",
    ScaleForgotten: "SCALE-1",
    RankMissing: "RED-1",
    OwnDataTwice: "RED-1",
    SharedAddedAfterReduction: "SHARED-1",
    ResidualOnEveryRank: "RED-3",
    NormOverPaddedWidth: "NORM-1",
    EpsOutsideTheRoot: "NORM-1",
    ResidualOverwritten: "OUT-4",
    StaleAtSecondCall: "RED-5",
    RoundsAtEachRank: "NUM-1",
}
"""Each with the clause that it breaks."""
