"""The launch below the contract: which way to the kernel, the workspace, one rank alone for timing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moe_backends.common.virtual_ranks import ranks_on_my_gpu
from moe_contract import RankGroup, TailCapacity, UnsupportedError

from . import header, package, plan
from .kernel import Call, Kernel
from .workspace import Workspace, allocate, alone, prefill

Way = Literal["auto", "header", "package"]
"""``header``: FlashInfer's header, compiled here in about 20 s. ``package``: its operator, whose module takes minutes
to build. ``auto``: the first that this machine can open, in that order."""


@dataclass(frozen=True)
class Engine:
    """One rank's opened kernel.

    Attributes:
        kernel: loaded.
        workspace: armed.
        capacity: the largest call.
        identity: int32 ``[max_tokens, 1]``, the map that reads a finalized ``[T, H]`` as one row a token.
    """

    kernel: Kernel
    workspace: Workspace
    capacity: TailCapacity
    identity: Tensor


def open_kernel(way: Way, dtype: torch.dtype, ranks: int, device: torch.device) -> Kernel:
    """The kernel by the way asked for.

    Raises:
        UnsupportedError: this machine cannot open it that way, or either way; one line with both reasons.
    """
    if way == "header":
        return header.open_kernel(dtype, ranks, device)
    if way == "package":
        return package.open_kernel(ranks, device)
    try:
        return header.open_kernel(dtype, ranks, device)
    except UnsupportedError as first:
        if first.clause == "CAP-2":
            raise  # no GPU, or one that neither way has a kernel for
        try:
            return package.open_kernel(ranks, device)
        except UnsupportedError as second:
            raise UnsupportedError(f"{first}; nor as a package: {second}", clause=second.clause) from second


def open_engine(
    group: RankGroup, capacity: TailCapacity, *, way: Way = "auto", ranks_per_gpu: int | None = None
) -> Engine:
    """Builds, loads and allocates everything that calls need. Collective.

    Args:
        group: 2, 4, 8 or 16 ranks.
        capacity: the largest call.
        way: to the kernel.
        ranks_per_gpu: ranks that a GPU has to hold together; None finds out.

    Raises:
        UnsupportedError: the sizes are past what the kernel can address, this machine cannot build or run it, or the
            ranks on one GPU do not fit together.
    """
    plan.require_sizes(capacity, group.size)
    kernel = open_kernel(way, capacity.dtype, group.size, group.device)
    with torch.cuda.device(group.device):
        _warm_up(kernel, group.size, capacity.dtype, group.device)
        sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
        shape = plan.shape_of(capacity.hidden_size, kernel.max_cluster)
        sharing = ranks_per_gpu or ranks_on_my_gpu(group)
        plan.require_resident(kernel.resident(shape), sharing, shape, shape.clusters(capacity.max_tokens, sms))
        identity = torch.arange(capacity.max_tokens, dtype=torch.int32, device=group.device)[:, None]
        return Engine(kernel, allocate(group, capacity), capacity, identity)


def fill_for_solo(engine: Engine, published: list[Tensor]) -> None:
    """Makes an engine's own rank callable alone, any number of times (workspace.prefill says how)."""
    size = plan.comm_bytes(engine.capacity, len(engine.workspace.slots))
    prefill(engine.workspace, published, size)
    torch.cuda.current_stream(engine.workspace.table.device).synchronize()


def launch(
    engine: Engine,
    rows: Tensor,
    weights: Tensor | None,
    index: Tensor,
    shared: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    residual_out: Tensor,
    norm_out: Tensor,
    *,
    scale: float,
    eps: float,
    weight_bias: float = 0.0,
    pdl: bool = False,
) -> None:
    """Launches one rank's part on the current stream; no checks, no allocation, no wait. Arguments as kernel.Call.

    Raises:
        RuntimeError: the launch was refused.
    """
    space = engine.workspace
    engine.kernel.run(
        Call(
            space.table, space.rank, len(space.slots), rows, weights, index, shared, residual, norm_weight,
            residual_out, norm_out, scale, eps, weight_bias, pdl,
        )
    )  # fmt: skip


def _warm_up(kernel: Kernel, ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    """One launch that waits for nobody: CUDA loads a kernel at its first, and that may wait for a device on which a
    peer already waits for us. Also the proof that the kernel runs here at all."""
    capacity = TailCapacity(1, plan.NORM_MULTIPLE, 1, dtype)
    size = plan.comm_bytes(capacity, ranks)
    space = alone(ranks, size, device)
    one = torch.zeros(1, plan.NORM_MULTIPLE, dtype=dtype, device=device)
    index, weights = one.new_zeros(1, 1, dtype=torch.int32), one[:, :1].contiguous()
    call = Call(space.table, 0, ranks, one, weights, index, None, one, one[0], one.clone(), one.clone(),
                1.0, 1.0, 0.0, False)  # fmt: skip
    try:
        kernel.run(call)
        torch.cuda.current_stream(device).synchronize()
    except RuntimeError as error:
        raise UnsupportedError(f"the kernel does not run here: {str(error).splitlines()[0]}") from error
