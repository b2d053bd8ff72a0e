"""What the FlashInfer consumer decides on the host: limits, launch shapes, memory layout, refusals; no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from moe_backends.flashinfer_tail import FlashInferConsumer, plan
from moe_backends.flashinfer_tail import build as build_module
from moe_backends.flashinfer_tail import launcher as launcher_module
from moe_backends.flashinfer_tail import workspace as memory
from moe_backends.flashinfer_tail.plan import Shape
from moe_contract import TailCapacity, UnsupportedError

from .thread_group import ThreadGroup, run_ranks, thread_groups

BF16, CPU = torch.bfloat16, torch.device("cpu")


def capacity(tokens: int = 8, hidden: int = 7168, top_k: int = 8, dtype: torch.dtype = BF16) -> TailCapacity:
    """A capacity with one field changed."""
    return TailCapacity(tokens, hidden, top_k, dtype)


def cuda_group(size: int) -> ThreadGroup:
    """A group that says it is on a GPU; nothing here touches the device."""
    group = thread_groups(size)[0]
    group.device = torch.device("cuda")
    return group


@pytest.mark.parametrize(("size", "asked", "reason"), [
    (1, capacity(), "CAP-1: 1 ranks are not among its world_sizes"),
    (3, capacity(), "world_sizes"),
    (2, capacity(hidden=7172), "multiple of 8"),
    (2, capacity(dtype=torch.float32), "dtypes"),
    (2, capacity(37450), "that is 37449 tokens"),
    (2, capacity(hidden=8200), "33 warps"),
])  # fmt: skip
def test_what_the_kernel_cannot_do_is_refused_before_anything_happens(
    size: int, asked: TailCapacity, reason: str
) -> None:
    """CAP-1: on every rank alike, before the first collective."""
    group = cuda_group(size)
    with pytest.raises(UnsupportedError, match=reason) as caught:
        FlashInferConsumer().open(group, asked)
    assert group.collectives == [] and "\n" not in str(caught.value)


def test_a_group_on_the_cpu_is_refused() -> None:
    """CAP-2: the reason names the device."""
    with pytest.raises(UnsupportedError, match="flashinfer-fused: CAP-2: cpu"):
        FlashInferConsumer().open(thread_groups(2)[0], capacity())


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
@pytest.mark.parametrize("way", ["auto", "header", "package"])
def test_without_a_gpu_opening_is_refused_in_one_line(way: launcher_module.Way) -> None:
    """CAP-2: no device, no traceback, whichever way to the kernel is asked for."""
    with pytest.raises(UnsupportedError, match="flashinfer-fused: CAP-2: torch sees no CUDA device") as caught:
        FlashInferConsumer(way=way).open(cuda_group(2), capacity())
    assert caught.value.clause == "CAP-2" and "\n" not in str(caught.value)


def test_importing_loads_neither_flashinfer_nor_device() -> None:
    """The entry point is imported by every listing of backends."""
    code = (
        "import sys, moe_backends.flashinfer_tail, torch\n"
        "print({'flashinfer', 'tvm_ffi'} & set(sys.modules), torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["set()", "False"]


@pytest.mark.parametrize(("hidden", "cluster", "threads"), [
    (7168, 4, 224), (4096, 8, 64), (2048, 8, 32), (2880, 4, 96), (8192, 8, 128), (16384, 8, 256), (256, 1, 32),
    (8, 1, 32), (2304, 1, 288), (5120, 4, 160),
])  # fmt: skip
def test_launch_shapes_are_those_of_their_launcher(hidden: int, cluster: int, threads: int) -> None:
    """The largest power of two up to 8 that divides the warps of a token."""
    assert plan.shape_of(hidden) == Shape(cluster, threads)


def test_a_device_with_smaller_clusters_gets_larger_blocks() -> None:
    """The launcher asks the device for its largest cluster; what then exceeds a block is refused."""
    assert plan.shape_of(7168, max_cluster=1) == Shape(1, 896)
    with pytest.raises(UnsupportedError, match="1 blocks of 2048 threads"):
        plan.shape_of(16384, max_cluster=1)


def test_a_launch_has_a_block_per_sm_at_most() -> None:
    """However many tokens there are."""
    shape = plan.shape_of(7168)
    assert [shape.clusters(tokens, 132) for tokens in (1, 33, 34, 10_000)] == [1, 33, 33, 33]


def test_slot_sizes_are_computed_past_32_bits() -> None:
    """The limit is where twice the bytes of a generation still fit into 31 bits."""
    assert plan.comm_bytes(capacity(131_072), 16) == 16 * 131_072 * 7168 * 2 > 2**32
    most = plan.COMM_LIMIT // (2 * 7168 * 2)
    plan.require_sizes(capacity(most), 2)
    with pytest.raises(UnsupportedError, match=f"that is {most} tokens"):
        plan.require_sizes(capacity(most + 1), 2)
    assert 2 * plan.comm_bytes(capacity(most), 2) < 2**31 <= 2 * plan.comm_bytes(capacity(most + 1), 2)


def test_ranks_that_do_not_fit_together_are_refused_with_the_count() -> None:
    """Ranks that wait for each other must all be resident; a rank with a GPU to itself waits for no room."""
    shape = plan.shape_of(7168)
    plan.require_resident(132, 4, shape, 33)
    plan.require_resident(1, 1, shape, 33)
    with pytest.raises(UnsupportedError, match=r"CAP-2: 8 ranks .* only 132 clusters .* at most 16 tokens"):
        plan.require_resident(132, 8, shape, 33)
    with pytest.raises(UnsupportedError, match="no room for a cluster of 4 blocks of 224 threads"):
        plan.require_resident(0, 1, shape, 1)


def test_the_estimate_of_an_h200_stays_below_what_its_sms_hold() -> None:
    """Where the kernel cannot be asked: N=2 and N=4 fit at any T, N=8 only small calls."""
    shape = plan.shape_of(7168)
    found = {ranks: plan.estimated_resident(shape, ranks, sms=132, threads=2048) for ranks in build_module.WORLD_SIZES}
    assert found == {2: 225, 4: 192, 8: 126, 16: 27}
    for ranks, clusters in found.items():
        assert clusters * shape.cluster * shape.threads * plan.REGISTERS[ranks] <= 132 * plan.SM_REGISTERS
        assert clusters * shape.cluster * shape.threads <= 132 * 2048
    assert found[2] >= 2 * 33 and found[4] >= 4 * 33 and found[8] < 8 * 33


def test_the_pointer_table_has_the_layout_that_the_kernel_reads() -> None:
    """``[buffers x N, flags x N, slots x N, control]``, and the control words with the bytes of a generation."""
    assert memory.table_of([10, 20], 99) == [0, 0, 0, 0, 10, 20, 99]
    assert memory.control_of(4096) == [0, 0, 0, 4096, 0]


def test_every_rank_sees_every_slot_and_all_are_armed() -> None:
    """Three generations a rank, negative zero throughout, the same addresses in every rank's table."""
    asked = capacity(3, 16, 2)
    found = run_ranks(thread_groups(2), lambda group: memory.allocate(group, asked))
    tables = [space.table.tolist() for space in found]
    assert tables[0][:6] == tables[1][:6] and tables[0][6] != tables[1][6]
    for rank, space in enumerate(found):
        assert space.rank == rank and space.control.tolist() == [0, 0, 0, 2 * 3 * 16 * 2, 0]
        assert tables[rank][6] == space.control.data_ptr()
        assert tables[rank][4:6] == [slots.data_ptr() for slots in space.slots]
        values = space.slots[rank].view(BF16)
        assert values.numel() == 3 * 2 * 3 * 16
        assert bool((values == 0).all()) and bool(values.signbit().all())


@pytest.mark.parametrize("tokens", [5, 3])
def test_solo_slots_lie_where_the_kernel_reads_them(tokens: int) -> None:
    """In each of the three generations, slot s of rank s's buffer holds its contribution, at an offset that depends on
    the call's T; no slot of a peer is unfilled; the own buffer stays armed."""
    asked = capacity(5, 16, 2)
    size = plan.comm_bytes(asked, 4)
    space = memory.alone(4, size, CPU)
    published = [torch.full((tokens, 16), float(rank), dtype=BF16) for rank in range(4)]
    published[2][0, 0] = -0.0
    memory.prefill(space, published, size)
    for source in (1, 2, 3):
        assert not bool((space.slots[source].view(torch.int16) == memory.NEGATIVE_ZERO).any())
        for generation in range(3):
            start = (generation * size) // 2 + source * tokens * 16
            read = space.slots[source].view(BF16)[start : start + tokens * 16].view(tokens, 16)
            assert torch.equal(read, published[source])
    assert bool((space.slots[0].view(torch.int16) == memory.NEGATIVE_ZERO).all())
