"""The launch below the contract: raw tensors, no checks, no allocation, no synchronisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from moe_backends.common.virtual_ranks import ranks_on_my_gpu
from moe_contract import RankGroup, TailCapacity, UnsupportedError

from . import configs
from .configs import Config, Form
from .library import Library, load
from .quant import Quant
from .workspace import Workspace, allocate

SOLO, PDL = 1, 2
"""Flags of a launch (enum Flag in kernels/params.h).

SOLO: never wait, read the receive slots as they are and leave them so; with ``prefill`` one rank alone can be timed.
PDL: programmatic dependent launch. Every kernel between two calls that is itself launched so must wait for its
predecessor (griddepcontrol.wait), or the call after it can overtake the call before it.
"""


@dataclass(frozen=True)
class Engine:
    """One rank's opened kernel: library, workspace, launch shapes. ``close`` ends it."""

    library: Library
    workspace: Workspace
    capacity: TailCapacity
    configs: tuple[Config, ...]
    handle: int

    def close(self) -> None:
        """Frees the plan; the memory goes with the last reference to the tensors."""
        self.library.destroy(self.handle)


def open_engine(
    group: RankGroup,
    capacity: TailCapacity,
    *,
    timeout_s: float = 10.0,
    forms: tuple[Form, ...] | None = None,
    concurrent_tails: int = 1,
    ranks_per_gpu: int | None = None,
    test_hooks: bool = False,
) -> Engine:
    """Builds, loads, allocates and arms everything that calls need. Collective. Options as CudaConsumer has them; for
    SOLO timing of virtual ranks ``ranks_per_gpu`` is 1.

    Raises:
        UnsupportedError: this machine cannot build or run the kernels, or the ranks on one GPU do not fit together.
    """
    library = load(capacity.dtype, group.size, group.device, test_hooks=test_hooks)
    with torch.cuda.device(group.device):
        sharing = (ranks_per_gpu or ranks_on_my_gpu(group)) * concurrent_tails
        shapes = _shapes(library, group, capacity, forms or configs.table()[group.size], sharing)
        workspace = allocate(group, capacity)
        device = torch.cuda.current_device()
    vecs, timeout_ns = capacity.hidden_size // configs.VECTOR, int(timeout_s * 1e9)
    numbers = [number for shape in shapes for number in shape.numbers()]
    handle = library.create(
        device, group.rank, vecs, capacity.top_k, workspace.tokens, timeout_ns, workspace.memory(),
        [slots.data_ptr() for slots in workspace.slots], numbers,
    )  # fmt: skip
    if group.size > 1:
        group.barrier()  # no rank launches before every rank has loaded its kernels and armed its slots
    return Engine(library, workspace, capacity, shapes, int(handle))


def _shapes(
    library: Library, group: RankGroup, capacity: TailCapacity, forms: tuple[Form, ...], sharing: int
) -> tuple[Config, ...]:
    """The forms that calls can meet, with the limits that all ranks agree on. Collective."""
    usable, hidden = list(configs.usable(forms, group.size, capacity)), capacity.hidden_size
    limits = agreed(group, [_limits(library, form, hidden, sharing, group.size) for form in usable])
    shapes = tuple(Config(form, form.threads(hidden), *pair) for form, pair in zip(usable, limits, strict=True))
    if shapes[-1].max_tokens < capacity.max_tokens:
        raise UnsupportedError(
            f"cuda: CAP-2: the forms run calls of at most {shapes[-1].max_tokens} tokens here, the capacity asks for "
            f"{capacity.max_tokens}; end them with a form that loops and has no limit of its own",
            clause="CAP-2",
        )
    return shapes


def _limits(library: Library, form: Form, hidden_size: int, sharing: int, ranks: int) -> tuple[int, int]:
    """How many blocks or clusters of one rank may be in flight, without and with a quantised output."""
    if ranks == 1 and not form.loops:  # none waits for another, and each has one token
        return configs.MAX_GROUPS, configs.MAX_GROUPS
    vecs, threads = hidden_size // configs.VECTOR, form.threads(hidden_size)
    without, with_quant = (
        configs.group_limit(int(library.resident(threads, form.blocks, int(form.two_shot), vecs, quant)), sharing, form)
        for quant in (False, True)
    )
    return without, with_quant


def agreed(group: RankGroup, limits: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The smallest of every rank's limits. They decide the form of a call, and one rank in one-shot with another in
    two-shot would wait for ever; GPUs of different sizes are thereby no hazard. Collective."""
    if group.size == 1:
        return limits
    mine = torch.tensor(limits, dtype=torch.int64, device=group.device)
    smallest = torch.stack(group.all_gather(mine)).amin(0).tolist()
    return [(pair[0], pair[1]) for pair in smallest]


class Operands(NamedTuple):
    """The tensors of a launch, in the order in which the binding takes their addresses."""

    routed: Tensor
    """Rows ``[P, H]`` with ``weights`` and ``row_map`` given, else the finalized ``[T, H]``."""
    weights: Tensor | None
    """``[T, K]`` in the activation dtype or float32."""
    row_map: Tensor | None
    """``[T, K]`` int32, -1 for an absent slot."""
    shared: Tensor | None
    """``[T, H]``."""
    residual: Tensor
    """``[T, H]``; gives T. May be ``residual_out`` itself."""
    norm_weight: Tensor
    """``[H]`` in the activation dtype or float32."""
    residual_out: Tensor | None
    """``[T, H]``; None skips the store, as for the outputs that follow."""
    norm_out: Tensor | None
    quant_out: Tensor | None
    """As quant.empty_quantised makes it, and ``quant_scale``."""
    quant_scale: Tensor | None


def launch(
    engine: Engine,
    operands: Operands,
    *,
    scale: float,
    eps: float,
    weight_bias: float = 0.0,
    quant: int = Quant.NONE.value,
    quant_arg: float = 1.0,
    stream: int,
    flags: int = 0,
    config: int = -1,
) -> None:
    """Launches one rank's tail on a stream. The caller answers for every shape, dtype, alignment and device.

    Args:
        engine: from open_engine, or ``CudaTail.engine``.
        operands: what is read and written.
        scale: routed scaling factor.
        eps, weight_bias: of the norm.
        quant, quant_arg: from quant.quant_code.
        stream: the address of a CUDA stream.
        flags: SOLO, PDL.
        config: index into ``engine.configs``; -1 picks by T.

    Raises:
        RuntimeError: CUDA refused the launch.
    """
    weights = operands.weights
    engine.library.run(
        engine.handle, config, operands.residual.shape[0],
        *(0 if tensor is None else tensor.data_ptr() for tensor in operands),
        quant, flags, weights is not None and weights.dtype == torch.float32,
        operands.norm_weight.dtype == torch.float32, scale, eps, weight_bias, quant_arg, stream,
    )  # fmt: skip


def prefill(engine: Engine, published: list[Tensor]) -> None:
    """Fills a rank's receive slots with what its peers would push, for SOLO launches of one-shot forms.

    ``published[r]`` is rank r's rounded contribution ``[T, H]``, T at most ``engine.workspace.tokens``; the own one
    is not used. ``engine.workspace.rearm()`` on every rank makes the tail ready for real calls again.
    """
    group, space = engine.workspace.group, engine.workspace
    own = space.slots[group.rank].view(published[0].dtype)
    own = own.view(2, group.size - 1, space.tokens, engine.capacity.hidden_size)
    for source, value in enumerate(published):
        if source != group.rank:
            own[:, source - (source > group.rank), : value.shape[0]] = value
