"""RED: ranks that are missing, doubled or out of order, residuals, and waits."""

from __future__ import annotations

import time
from functools import partial

import torch
from torch import Tensor

from moe_conformance.faults import plain_tail
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail
from moe_contract import MoEOutput, PeerTimeoutError

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)
LONGEST_POLL_S = 12.0
"""An endless poll that ends all the same, after the suite has called it a hang (10 s), so that no thread is left."""


@consumer_fault("RED-1", smallest="two ranks")
class LastRankMissing(PlainTail):
    """The last rank's part is not summed."""

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """All but the last."""
        return super().add_ranks(parts[: max(1, len(parts) - 1)])


@consumer_fault("RED-1", smallest="two ranks")
class OwnPartTwice(PlainTail):
    """A rank adds its own part again."""

    def reduce(self, local: Tensor) -> Tensor:
        """Once more."""
        total = super().reduce(local)
        return total if self.group.size == 1 else total + local.float()


@consumer_fault("RED-1", bugs=("TensorRT-LLM#6850", "sglang#28619"), smallest="two ranks")
class NothingReduced(PlainTail):
    """The output of a rank is its own part, as a last layer's whose reduction was left to the next norm."""

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """The own part."""
        return parts[self.group.rank]


@consumer_fault("RED-1", bugs=("sglang#20110", "sglang#37199"), smallest="two ranks, each emits 1")
class ReducedTwice(PlainTail):
    """What was reduced is reduced again: N times too large."""

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """N times the sum."""
        return super().add_ranks(parts) * self.group.size


@consumer_fault(
    "RED-1", bugs=("sglang#32963",), smallest="four ranks as 2 x 2, each emits 1; with two ranks one of them"
)
class OneAxisReduced(PlainTail):
    """Of an expert x tensor parallel grid only the ranks of the own row are summed."""

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """The own half."""
        half = max(1, len(parts) // 2)
        first = self.group.rank // half * half
        return super().add_ranks(parts[first : first + half])


@consumer_fault("RED-1", bugs=("sglang#11632",), smallest="two ranks, two tokens")
class TokensOfAPeerInAnotherOrder(PlainTail):
    """A peer's tokens are one further than the own ones, as another attention layout has them."""

    def parts(self, local: Tensor) -> list[Tensor]:
        """Rolled, but for the own."""
        parts = super().parts(local)
        return [part if rank == self.group.rank else part.roll(1, 0) for rank, part in enumerate(parts)]


@consumer_fault("RED-2", smallest="two ranks, a value that rounds")
class OwnPartUnrounded(PlainTail):
    """A rank adds its own part in float32 and its peers' rounded."""

    def reduce(self, local: Tensor) -> Tensor:
        """With the value from before it was published."""
        parts = [part.float() for part in self.parts(local)]
        if len(parts) > 1:
            parts[self.group.rank] = self.kept["unrounded"]
        return self.add_ranks(parts)

    def publish(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """Keeps the value."""
        self.kept["unrounded"] = local
        return local.to(dtype)


@consumer_fault("RED-2", smallest="three ranks, or two whose float32 sums round differently")
class SumStartsAtItself(PlainTail):
    """Each rank starts the sum with its own part and the residual, and then goes round."""

    def add_ranks(self, parts: list[Tensor]) -> Tensor:
        """Kept apart until the residual comes."""
        own = self.group.rank
        self.kept["order"] = parts[own:] + parts[:own]
        return super().add_ranks(parts)

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """Residual first, then rank after rank from the own one, in float32."""
        running = residual.float()
        for part in self.kept["order"]:
            running = running + part
        return running.to(residual.dtype)


@consumer_fault("RED-2", smallest="rank 1, the last column")
class LastBitOfOneRank(PlainTail):
    """The last rank's last column is one unit off."""

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """Next number up."""
        out = super().add_residual(total, residual)
        if self.group.size > 1 and self.group.rank == self.group.size - 1:
            out.view(torch.int16)[:, -1] += 1
        return out


@consumer_fault("RED-3", smallest="two ranks")
class ResidualOnEveryRank(PlainTail):
    """The residual is added before the reduction, once a rank."""

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """N times."""
        return (total + self.group.size * residual.float()).to(residual.dtype)


@consumer_fault("RED-3", smallest="T=1")
class ResidualLeftOut(PlainTail):
    """The residual is not added."""

    def add_residual(self, total: Tensor, residual: Tensor) -> Tensor:
        """The sum alone."""
        return total.to(residual.dtype)


@consumer_fault("RED-4", bugs=("vllm#54152",), smallest="two ranks, one with only -1")
class SecondAllReduceOnOneRank(PlainTail):
    """A rank without routes falls back to a second reduction that no peer takes part in."""

    def local(self, output: MoEOutput) -> Tensor:
        """Notes whether there is anything."""
        routed = output.routed
        self.kept["empty"] = not isinstance(routed, Tensor) and bool((routed.expanded_idx_to_permuted_idx < 0).all())
        return super().local(output)

    def reduce(self, local: Tensor) -> Tensor:
        """Once more on that rank."""
        total = super().reduce(local)
        if self.kept["empty"] and self.group.rank == 0 and self.group.size > 1:
            self.group.all_reduce(local)
        return total


@consumer_fault("RED-4", smallest="two ranks, one with zeros")
class ZerosAreNotSent(PlainTail):
    """A rank whose part is all zero skips the exchange."""

    def parts(self, local: Tensor) -> list[Tensor]:
        """Nothing to send, nothing received."""
        if self.group.size > 1 and local.numel() and not bool(local.any()):
            return [local]
        return super().parts(local)


@consumer_fault("RED-6", smallest="two ranks, one never started")
class MissingPeerIgnored(PlainTail):
    """The wait for a peer runs out, and the call goes on without it."""

    def parts(self, local: Tensor) -> list[Tensor]:
        """Own data in place of a peer's."""
        try:
            return super().parts(local)
        except PeerTimeoutError:
            return [local]


@consumer_fault("RED-6", bugs=("sglang#30209",), smallest="two ranks, one never started")
class PollsWithoutALimit(PlainTail):
    """A peer that does not come is waited for without end."""

    def parts(self, local: Tensor) -> list[Tensor]:
        """Goes on polling."""
        try:
            return super().parts(local)
        except PeerTimeoutError:
            time.sleep(LONGEST_POLL_S)
            raise


@consumer_fault("RED-6", smallest="two ranks, one never started")
class TimeoutNamesNobody(PlainTail):
    """The wait ends with an error that does not say who is missing."""

    def parts(self, local: Tensor) -> list[Tensor]:
        """A bare error."""
        try:
            return super().parts(local)
        except PeerTimeoutError:
            raise PeerTimeoutError("a peer timed out") from None
