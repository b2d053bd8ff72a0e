"""The ways to FlashInfer's kernel: its headers, its package, and what is brought along in their place."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from moe_backends.flashinfer_tail import build as build_module
from moe_backends.flashinfer_tail import header, package
from moe_backends.flashinfer_tail import launcher as launcher_module
from moe_backends.flashinfer_tail.__main__ import main
from moe_backends.flashinfer_tail.kernel import Call
from moe_contract import UnsupportedError

BF16 = torch.bfloat16


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
