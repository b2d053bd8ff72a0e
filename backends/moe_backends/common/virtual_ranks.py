"""How many ranks one GPU has to hold at a time."""

from __future__ import annotations

import torch

from moe_contract import RankGroup


def ranks_on_my_gpu(group: RankGroup) -> int:
    """How many ranks of the group run on this rank's GPU (virtual ranks); 1 where each has its own. Collective."""
    if group.size == 1:
        return 1
    uuid = str(torch.cuda.get_device_properties(group.device).uuid).encode()
    mine = torch.tensor(list(uuid), dtype=torch.int64, device=group.device)
    return sum(bool(torch.equal(other, mine)) for other in group.all_gather(mine))
