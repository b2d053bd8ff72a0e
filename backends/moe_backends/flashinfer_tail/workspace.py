"""The memory of one opened tail, laid out as FlashInfer's kernels expect it. Allocated once.

Every rank has three generations of slots ``[3, N, T, H]``; T is that of the call, so slot r of a call begins at
``r * T * H`` elements. A slot that has not been filled is negative zero throughout, which is why the kernel publishes
+0 where it means -0. In a call rank r writes its contribution into slot r of every rank's buffer, and reads slot s
from the buffer of rank s itself, over the link where there is one. It restores the generation of the call before, in
its own buffer only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_contract import RankGroup, TailCapacity

from .plan import comm_bytes

GENERATIONS = 3
NEGATIVE_ZERO = -0x8000
"""The bits of -0 in bfloat16 and in float16, as an int16."""


@dataclass(frozen=True)
class Workspace:
    """One rank's part; every tensor is kept because the kernel holds its address.

    Attributes:
        rank: of this part.
        slots: uint8 ``[3 * comm_bytes]`` of every rank.
        control: int32 ``[5]``: blocks that have started, unused, generation, bytes of a generation, elements to clear.
        table: int64 ``[3 * N + 1]`` addresses on the device.
    """

    rank: int
    slots: list[Tensor]
    control: Tensor
    table: Tensor


def table_of(slots: list[int], control: int) -> list[int]:
    """``[buffers x N, flags x N, slots x N, control]`` as addresses.

    The first two are of other kernels that share the layout. This one never reads them, and null would fault at once
    in a version that did.
    """
    return [0] * (2 * len(slots)) + slots + [control]


def control_of(generation_bytes: int) -> list[int]:
    """The control words before the first call."""
    return [0, 0, 0, generation_bytes, 0]


def allocate(group: RankGroup, capacity: TailCapacity) -> Workspace:
    """One rank's workspace, armed. Collective: returns when every rank's is."""
    size = comm_bytes(capacity, group.size)
    slots = group.peer_memory(GENERATIONS * size)
    arm(slots[group.rank])
    workspace = assemble(group.rank, slots, size)
    if group.device.type == "cuda":
        torch.cuda.current_stream(group.device).synchronize()
    group.barrier()
    return workspace


def arm(slots: Tensor) -> None:
    """Makes every slot one that has not been filled, on the current stream."""
    slots.view(torch.int16).fill_(NEGATIVE_ZERO)


def assemble(rank: int, slots: list[Tensor], generation_bytes: int) -> Workspace:
    """Control and table for slots that are there."""
    device = slots[rank].device
    control = torch.tensor(control_of(generation_bytes), dtype=torch.int32, device=device)
    addresses = table_of([buffer.data_ptr() for buffer in slots], control.data_ptr())
    return Workspace(rank, slots, control, torch.tensor(addresses, dtype=torch.int64, device=device))


def alone(ranks: int, generation_bytes: int, device: torch.device) -> Workspace:
    """A workspace of rank 0 whose peers have sent zeros, for good."""
    slots = [torch.zeros(GENERATIONS * generation_bytes, dtype=torch.uint8, device=device) for _ in range(ranks)]
    arm(slots[0])
    return assemble(0, slots, generation_bytes)


def prefill(workspace: Workspace, published: list[Tensor], generation_bytes: int) -> None:
    """Fills the peers' slots, so that ``workspace.rank`` alone can be called again and again without waiting.

    Rank s's contribution is read from slot s of rank s's own buffer, and a call restores slots of its own rank's
    buffer only. So what lies in a peer's buffer stays, in all three generations; the rank's pushes land in another
    slot of it, its own. The own slot it fills, reads and restores as ever. What is timed is therefore the whole
    kernel with all its traffic, less the waiting.

    Where slot s begins depends on T, so only calls with the T of ``published`` read these values. Another T within the
    capacity reads other parts of the same buffers, which hold no negative zero either: wrong values, but no wait.

    Args:
        workspace: of the one rank; its peers' buffers are still as ``peer_memory`` gave them, all +0.
        published: every rank's contribution ``[T, H]``; the own one is not used.
        generation_bytes: as the workspace was made with.
    """
    for source, value in enumerate(published):
        if source == workspace.rank:
            continue
        sent = value + 0.0  # turns -0 into +0, as the kernel does before it publishes
        generations = workspace.slots[source].view(value.dtype).view(GENERATIONS, generation_bytes // value.itemsize)
        generations[:, source * value.numel() : (source + 1) * value.numel()] = sent.reshape(-1)
