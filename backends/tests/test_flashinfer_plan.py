"""What the FlashInfer consumer decides on the host: limits, launch shapes, memory layout, refusals; no GPU."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from moe_backends.flashinfer_tail import DECLARATION, Engine, FlashInferConsumer, FlashInferTail, header, package, plan
from moe_backends.flashinfer_tail import build as build_module
from moe_backends.flashinfer_tail import launcher as launcher_module
from moe_backends.flashinfer_tail import workspace as memory
from moe_backends.flashinfer_tail.__main__ import main
from moe_backends.flashinfer_tail.kernel import Call
from moe_backends.flashinfer_tail.plan import Shape
from moe_contract import ContractViolation, MoEOutput, TailCapacity, UnfinalizedMoEOutput, UnsupportedError

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


class RecordingKernel:
    """Notes its calls; what a tail would launch."""

    way = "header"
    max_cluster = plan.MAX_CLUSTER

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def resident(self, shape: Shape) -> int:
        """Room for anything."""
        return 10**6

    def run(self, call: Call) -> None:
        """Keeps the call."""
        self.calls.append(call)


def opened(kernel: RecordingKernel) -> FlashInferTail:
    """A tail of 2 ranks on the CPU, for what it decides before it launches."""
    asked = capacity(4, 16, 2)
    identity = torch.arange(4, dtype=torch.int32)[:, None]
    return FlashInferTail(DECLARATION, Engine(kernel, memory.alone(2, plan.comm_bytes(asked, 2), CPU), asked, identity))


def output(tokens: int, weights_dtype: torch.dtype = BF16, rows: int = 6) -> MoEOutput:
    """A legal output of H 16 and K 2."""
    index = torch.arange(tokens * 2, dtype=torch.int32).view(tokens, 2)
    weights = torch.ones(tokens, 2, dtype=weights_dtype)
    return MoEOutput(UnfinalizedMoEOutput(torch.ones(rows, 16, dtype=BF16), weights, index), None, 1.0)


def test_no_tokens_no_launch() -> None:
    """OUT-2: an empty call has empty results and does not count as a call of the kernel."""
    kernel = RecordingKernel()
    empty = torch.ones(0, 16, dtype=BF16)
    found = opened(kernel)(MoEOutput(empty, None, 2.5), empty, torch.ones(16, dtype=BF16), eps=1e-6)
    assert kernel.calls == []
    assert found.residual_out.shape == found.norm_out.shape == (0, 16)


def test_a_call_reaches_the_kernel_as_it_is() -> None:
    """Tensors without copies, the scale, the form of the norm; the outputs are what the kernel was given to write."""
    kernel = RecordingKernel()
    given, residual, gamma = output(2), torch.ones(2, 16, dtype=BF16), torch.ones(16, dtype=BF16)
    given = MoEOutput(given.routed, residual.clone(), 2.5)
    found = opened(kernel)(given, residual, gamma, eps=1e-5, weight_bias=1.0)
    (call,) = kernel.calls
    triple = given.routed
    assert isinstance(triple, UnfinalizedMoEOutput)
    assert call.rows is triple.gemm2_permuted and call.weights is triple.expert_weights
    assert call.index is triple.expanded_idx_to_permuted_idx
    assert call.shared is given.shared_output and call.residual is residual and call.norm_weight is gamma
    assert call.residual_out is found.residual_out and call.norm_out is found.norm_out
    assert (call.rank, call.ranks, call.scale, call.eps, call.weight_bias, call.pdl) == (0, 2, 2.5, 1e-5, 1.0, False)


def test_a_finalized_tensor_is_one_unweighted_row_a_token() -> None:
    """The identity as the map and no weights: the kernel then starts from the tensor's own values."""
    kernel = RecordingKernel()
    routed, residual = torch.full((3, 16), 2.0, dtype=BF16), torch.ones(3, 16, dtype=BF16)
    opened(kernel)(MoEOutput(routed, None, 1.0), residual, torch.ones(16, dtype=BF16), eps=1e-6)
    assert kernel.calls[0].rows is routed and kernel.calls[0].weights is None
    assert kernel.calls[0].index.tolist() == [[0], [1], [2]] and kernel.calls[0].index.is_contiguous()


def test_what_the_kernel_would_misread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 weights or norm weight, a flat map, rows past 32 bits: never launched."""
    kernel = RecordingKernel()
    tail, residual, gamma = opened(kernel), torch.ones(2, 16, dtype=BF16), torch.ones(16, dtype=BF16)
    with pytest.raises(UnsupportedError, match="WGT-2"):
        tail(output(2, torch.float32), residual, gamma, eps=1e-6)
    with pytest.raises(UnsupportedError, match="NORM-1"):
        tail(output(2), residual, gamma.float(), eps=1e-6)
    flat = output(2)
    flat.routed.expanded_idx_to_permuted_idx = torch.arange(4, dtype=torch.int32)  # type: ignore[union-attr]
    with pytest.raises(ContractViolation, match="MAP-1"):
        tail(flat, residual, gamma, eps=1e-6)
    monkeypatch.setattr(plan, "ROW_LIMIT", 6 * 16 - 1)
    with pytest.raises(UnsupportedError, match="MAP-6: gemm2_permuted has 96 elements"):
        tail(output(2), residual, gamma, eps=1e-6)
    assert kernel.calls == []


def test_a_closed_tail_says_so() -> None:
    """A call after close is an error of its own."""
    tail = opened(RecordingKernel())
    tail.engine = None
    with pytest.raises(RuntimeError, match="this tail is closed"):
        tail(output(1), torch.ones(1, 16, dtype=BF16), torch.ones(16, dtype=BF16), eps=1e-6)


def test_without_flashinfer_the_reason_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither folder nor package: one line that names both; a folder without the header is named."""
    monkeypatch.delenv(build_module.HOME_VARIABLE, raising=False)
    monkeypatch.setattr(build_module, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"flashinfer is missing: pip install .* set MOE_FLASHINFER_HOME"):
        build_module.find_headers()
    monkeypatch.setenv(build_module.HOME_VARIABLE, str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"MOE_FLASHINFER_HOME=.* has no .*trtllm_moe_allreduce_fusion.cuh"):
        build_module.find_headers()


@pytest.mark.parametrize(("root", "spdlog"), [("flashinfer/data", "spdlog/include"), (".", "3rdparty/spdlog/include")])
def test_headers_are_found_in_a_wheel_and_in_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: str, spdlog: str
) -> None:
    """The two layouts that FlashInfer is distributed in."""
    header_file = tmp_path / root / "include" / build_module.HEADER
    header_file.parent.mkdir(parents=True)
    header_file.write_text("")
    (header_file.parent.parent / "utils.cuh").write_text("")
    (tmp_path / root / spdlog).mkdir(parents=True)
    monkeypatch.setenv(build_module.HOME_VARIABLE, str(tmp_path))
    found = build_module.find_headers()
    assert [name for name, _ in found.files()] == [build_module.HEADER.as_posix(), "flashinfer/utils.cuh"]


def test_a_library_that_is_brought_along_needs_neither_headers_nor_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MOE_FLASHINFER_TAIL_SO is taken as it is; a path that leads nowhere is named."""
    given = tmp_path / "tail.so"
    monkeypatch.setenv(build_module.LIBRARY_VARIABLE, str(given))
    monkeypatch.setattr(build_module, "find_nvcc", lambda: pytest.fail("the compiler was looked for"))
    with pytest.raises(UnsupportedError, match=r"MOE_FLASHINFER_TAIL_SO=.*tail.so is not a file"):
        build_module.library_path("90a")
    given.write_text("not a library")
    assert build_module.library_path("90a") == given
    with pytest.raises(UnsupportedError, match=r"tail\.so cannot be loaded"):
        header.open_library(given)


def test_the_module_brought_along_takes_the_place_of_flashinfers_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MOE_FLASHINFER_COMM_SO is what the package loads instead of building; the operator is called by keyword."""
    given, calls = tmp_path / "trtllm_comm.so", []
    given.write_text("")
    inner, comm = ModuleType("flashinfer.comm.trtllm_ar"), ModuleType("flashinfer.comm")
    inner.gen_trtllm_comm_module = lambda: pytest.fail("the package built its module")  # type: ignore[attr-defined]
    inner.get_trtllm_comm_module = lambda: calls.append(inner.gen_trtllm_comm_module().build_and_load())  # type: ignore[attr-defined]
    comm.trtllm_moe_finalize_allreduce_fusion = lambda **given: calls.append(given)  # type: ignore[attr-defined]
    loader = SimpleNamespace(load_module=lambda path: f"loaded {path}")
    for name, module in (("flashinfer.comm", comm), ("flashinfer.comm.trtllm_ar", inner), ("tvm_ffi", loader)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(package.MODULE_VARIABLE, str(given))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    one = torch.ones(1, 8)
    package.PackageKernel(package._operator(), 2).run(
        Call(one, 1, 2, one, one, one, None, one, one, one, one, 2.5, 1e-6, 1.0, True)
    )
    assert calls[0] == f"loaded {given}"
    assert (calls[1]["world_rank"], calls[1]["world_size"], calls[1]["routed_scaling_factor"]) == (1, 2, 2.5)
    assert calls[1]["expert_scale_factor"] is one and calls[1]["launch_with_pdl"] is True


def refuse(error: Exception) -> Callable[..., None]:
    """A way to the kernel that raises this."""

    def open_kernel(*arguments: object) -> None:
        raise error

    return open_kernel


def test_both_reasons_are_given_when_neither_way_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, so that the user can choose which lack to mend; words in it decide nothing."""
    monkeypatch.setattr(launcher_module.header, "open_kernel", refuse(UnsupportedError("no compiler: CAP-2")))
    monkeypatch.setattr(launcher_module.package, "open_kernel", refuse(UnsupportedError("no package", clause="CAP-2")))
    with pytest.raises(UnsupportedError, match=r"^no compiler: CAP-2; nor as a package: no package$") as caught:
        launcher_module.open_kernel("auto", BF16, 2, torch.device("cuda"))
    assert caught.value.clause == "CAP-2"


def test_a_gpu_without_the_kernel_is_not_asked_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """CAP-2, by the refusal's clause: neither way has a kernel for such a GPU, so the package is not imported."""
    monkeypatch.setattr(launcher_module.header, "open_kernel", refuse(UnsupportedError("no GPU", clause="CAP-2")))
    monkeypatch.setattr(launcher_module.package, "open_kernel", refuse(AssertionError("asked")))
    with pytest.raises(UnsupportedError, match=r"^no GPU$"):
        launcher_module.open_kernel("auto", BF16, 2, torch.device("cuda"))


def test_the_call_structure_has_the_size_that_the_library_expects() -> None:
    """The static_assert of kernels/launch.cu, from this side."""
    size = ctypes.sizeof(header._Call)
    assert f"static_assert(sizeof(Call) == {size}," in build_module.SOURCE.read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_the_command_line_fails_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a GPU and without ``--arch`` there is nothing to build for."""
    assert main(["build"]) == 1
    assert capsys.readouterr().err == "CAP-2: torch sees no CUDA device\n"
