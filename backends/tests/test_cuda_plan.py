"""What the CUDA consumer decides on the host: limits, sizes, launch shapes, refusals; no GPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from moe_backends.cuda import DECLARATION, CudaConsumer, Form, configs, launcher, workspace
from moe_backends.cuda.build import SOURCES, WORLD_SIZES
from moe_backends.cuda.quant import Quant, empty_quantised, quant_code
from moe_contract import PeerTimeoutError, QuantFormat, QuantRecipe, TailCapacity, UnsupportedError

from .thread_group import ThreadGroup, run_ranks, thread_groups

BF16 = torch.bfloat16


def capacity(tokens: int = 8, hidden: int = 7168, top_k: int = 8, dtype: torch.dtype = BF16) -> TailCapacity:
    """A capacity with one field changed."""
    return TailCapacity(tokens, hidden, top_k, dtype)


def cuda_group(size: int) -> ThreadGroup:
    """A group that says it is on a GPU; nothing here touches the device."""
    group = thread_groups(size)[0]
    group.device = torch.device("cuda")
    return group


@pytest.mark.parametrize(("size", "asked", "reason"), [
    (3, capacity(), "world_sizes"),
    (2, capacity(hidden=7172), "multiple of 8"),
    (2, capacity(hidden=16392), "max_hidden_size"),
    (2, capacity(top_k=33), "max_top_k"),
    (2, capacity(dtype=torch.float32), "dtypes"),
])  # fmt: skip
def test_what_lies_past_the_declared_limits_is_refused_before_anything_happens(
    size: int, asked: TailCapacity, reason: str
) -> None:
    """CAP-1: on every rank alike, before the first collective."""
    group = cuda_group(size)
    with pytest.raises(UnsupportedError, match=reason):
        CudaConsumer().open(group, asked)
    assert group.collectives == []


def test_a_group_on_the_cpu_is_refused() -> None:
    """CAP-2: the reason names the device."""
    with pytest.raises(UnsupportedError, match="CAP-2: cpu"):
        CudaConsumer().open(thread_groups(1)[0], capacity())


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_without_a_gpu_opening_is_refused_in_one_line() -> None:
    """CAP-2: no device, no traceback."""
    with pytest.raises(UnsupportedError, match="no CUDA device") as caught:
        CudaConsumer().open(cuda_group(1), capacity())
    assert "\n" not in str(caught.value)


def test_importing_loads_neither_binding_nor_device() -> None:
    """The entry point is imported by every listing of backends."""
    code = "import sys, moe_backends.cuda, torch; print('tvm_ffi' in sys.modules, torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("ranks", WORLD_SIZES)
def test_the_table_covers_every_rank_count_and_every_call(ranks: int) -> None:
    """Rows grow in max_tokens, the last has no limit, and one rank has no two-shot."""
    rows = configs.table()[ranks]
    limits = [row.max_tokens for row in rows]
    assert limits == sorted(limits) and limits[-1] == configs.NO_LIMIT
    assert ranks > 1 or not any(row.two_shot for row in rows)
    assert rows[-1].loops
    assert next(configs.usable(rows, ranks, capacity(1))) == rows[0]
    assert list(configs.usable(rows, ranks, capacity(10**6))) == list(rows)
    assert all(row.fits(16384) for row in configs.usable(rows, ranks, capacity(10**6, 16384)))


@pytest.mark.parametrize("hidden", [8, 256, 2304, 2688, 2880, 3584, 7168, 16384])
def test_threads_cover_a_token(hidden: int) -> None:
    """Whole warps, within the block's limit, enough vectors in the cluster form."""
    for form in (Form(blocks=4), Form(blocks=2), Form(blocks=1), Form(vectors=1), Form(vectors=2), Form(vectors=4)):
        threads = form.threads(hidden)
        assert threads % 32 == 0 and 32 <= threads <= configs.MAX_THREADS
        if not form.loops:
            assert (threads * form.blocks * form.vectors_per_thread * configs.VECTOR >= hidden) == form.fits(hidden)


def test_constants_agree_with_the_kernels() -> None:
    """Numbers that Python and the device code both hold."""
    text = "".join(path.read_text() for path in SOURCES.iterdir())
    for line in (
        f"kMaxCluster = {max(configs.CLUSTERS)};", f"kMaxWarps = {configs.MAX_THREADS // configs.WARP};",
        f"kHeldAlone = {configs.HELD_ALONE};",
        f"kVecElems = {configs.VECTOR};", f"kGenerations = {workspace.GENERATIONS};",
        f"kMaxTopK = {DECLARATION.max_top_k};", f"kMaxRanks = {max(WORLD_SIZES)};", "kArmed = 0xFFFFFFFFu;",
        f"kNoQuant = {Quant.NONE:d}, kFp8Static = {Quant.FP8_STATIC:d}, kFp8Token = {Quant.FP8_TOKEN:d},",
        f"kNvfp4Linear = {Quant.NVFP4_LINEAR:d}, kNvfp4Swizzled = {Quant.NVFP4_SWIZZLED:d} }};",
        f"kSolo = {launcher.SOLO},", f"kPdl = {launcher.PDL},",
    ):  # fmt: skip
        assert line in text


def test_too_many_ranks_for_one_gpu_are_refused_with_the_count() -> None:
    """Ranks that wait for each other must all be resident."""
    assert configs.group_limit(264, 8, Form()) == 33
    with pytest.raises(UnsupportedError, match=r"16 ranks on one GPU .* only 12 clusters"):
        configs.group_limit(12, 16, Form(blocks=4))


def test_ranks_agree_on_the_smallest_limits() -> None:
    """A smaller GPU in the group decides for all, so that every rank takes the same form."""
    offered = [[(60, 30), (264, 132)], [(62, 28), (200, 140)]]
    found = run_ranks(thread_groups(2), lambda group: launcher.agreed(group, offered[group.rank]))
    assert found == [[(60, 28), (200, 132)]] * 2


def test_slot_sizes_are_computed_past_32_bits() -> None:
    """The product that overflowed elsewhere (flashinfer#1223), and the bound on what a rank spends."""
    assert workspace.slot_bytes(131_072, 4096, 16) == 2 * 15 * 131_072 * 4096 * 2 > 2**32
    for ranks in (2, 4, 8, 16):
        tokens = workspace.slot_tokens(capacity(131_072), ranks)
        assert workspace.slot_bytes(tokens, 7168, ranks) <= workspace.MAX_SLOT_BYTES
        assert workspace.MIN_SLOT_TOKENS <= tokens <= workspace.MAX_SLOT_TOKENS
    assert workspace.slot_tokens(capacity(5), 8) == 5
    assert workspace.slot_tokens(capacity(131_072), 1) == 131_072


def test_a_lost_peer_is_raised_from_the_report() -> None:
    """RED-6: the bytes that the kernel writes become an error with rank, peer, token and epoch."""
    report = torch.zeros(ctypes.sizeof(workspace._Report), dtype=torch.uint8)
    space = workspace.Workspace(cuda_group(2), 4, [], torch.zeros(5, dtype=torch.int32), report, torch.zeros(3))
    space.raise_if_lost()
    report.view(torch.int32)[:4] = torch.tensor([1, 0, 3, 7], dtype=torch.int32)
    report.view(torch.int64)[2] = 2**33 + 1
    with pytest.raises(PeerTimeoutError, match=rf"rank 0 waited in vain for rank 3 at token {2**33 + 1} \(epoch 7 of"):
        space.raise_if_lost()


@pytest.mark.parametrize("recipe", [
    QuantRecipe(QuantFormat.FP8_STATIC, scale=0.5), QuantRecipe(QuantFormat.FP8_PER_TOKEN),
    QuantRecipe(QuantFormat.NVFP4, global_scale=3.0, scale_layout="linear"),
    QuantRecipe(QuantFormat.NVFP4, global_scale=3.0),
], ids=str)  # fmt: skip
def test_quantised_outputs_have_the_recipes_shapes(recipe: QuantRecipe) -> None:
    """Shape and dtype of the reference's quantiser."""
    from moe_backends.reference.quantize import quantize

    norm = torch.ones(130, 1056, dtype=BF16)
    for made, wanted in zip(empty_quantised(norm, quant_code(recipe)[0]), quantize(norm, recipe), strict=True):
        assert (made.shape, made.dtype) == (wanted.shape, wanted.dtype)
