"""RED-5: calls that see what another call left behind, or that start before its data has come."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from moe_conformance.faults import plain_tail
from moe_conformance.faults.model import Fault
from moe_conformance.faults.plain_tail import PlainTail

FAULTS: list[Fault] = []
consumer_fault = partial(plain_tail.consumer_fault, into=FAULTS)


@consumer_fault("RED-5", bugs=("tokenspeed#351",), smallest="T = 4, then 2")
class StaleWhereTheBatchShrank(PlainTail):
    """After a larger call, what it left in the buffer is summed again."""

    def reduce(self, local: Tensor) -> Tensor:
        """With the last call's rows where it had more."""
        total = super().reduce(local)
        stale = self.kept.get("stale")
        self.kept["stale"] = total
        return total + stale[: total.shape[0]] if stale is not None and stale.shape[0] > total.shape[0] else total


@consumer_fault("RED-5", bugs=("vllm#45448", "flashinfer#3835"), smallest="the second call")
class SecondCallReadsTheFirst(PlainTail):
    """The wait ends at once from the second call on, so peers' parts are those of the call before."""

    def parts(self, local: Tensor) -> list[Tensor]:
        """The last call's parts, cut or filled to size."""
        parts = super().parts(local)
        before, self.kept["parts"] = self.kept.get("parts"), parts
        if before is None or self.group.size == 1:
            return parts
        stale = [torch.zeros_like(local) for _ in parts]
        for rank, old in enumerate(before):
            rows = min(len(old), len(local))
            stale[rank][:rows] = old[:rows]
        stale[self.group.rank] = local
        return stale


@consumer_fault("RED-5", bugs=("TensorRT-LLM#14668", "vllm#34948"), smallest="a delayed rank")
class LaunchedBeforeItsPeerIsDone(PlainTail):
    """A flag is raised before the data is visible: in the third call the last token of a peer is not there yet."""

    def parts(self, local: Tensor) -> list[Tensor]:
        """Zeros for it."""
        parts = super().parts(local)
        if self.calls < 3 or self.group.size == 1:
            return parts
        late = parts[-1].clone()
        late[-1:] = 0
        return [*parts[:-1], late]


@consumer_fault("RED-5", bugs=("TensorRT-LLM#13294",), smallest="the fourth call")
class MapOfTheLastTokenHasNotCome(PlainTail):
    """The routing kernel signals early: from the fourth call on the last token's map is still unwritten, all -1."""

    def terms(self, routed):  # type: ignore[no-untyped-def]  # as the base's
        """That token's slots add nothing."""
        terms = super().terms(routed)
        if self.calls >= 4 and terms.shape[0]:
            terms[-1] = 0
        return terms
