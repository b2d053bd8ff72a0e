"""The kernels compile for both architectures within their register budget, and the build cache behaves; no GPU."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moe_backends.cuda import build as build_module
from moe_backends.cuda.__main__ import main
from moe_backends.cuda.binding import Binding
from moe_backends.cuda.build import SOURCES, Variant, build, compile_device
from moe_backends.jit import toolchain
from moe_contract import UnsupportedError


def _has(find: object) -> bool:
    try:
        find()  # type: ignore[operator]
    except UnsupportedError:
        return False
    return True


needs_nvcc = pytest.mark.skipif(not _has(toolchain.find_nvcc), reason="needs nvcc")
REGISTERS = {"held": {1: 128, 2: 112, 4: 112}, "looped": {1: 72, 2: 72, 4: 96, 8: 96, 16: 96}}
"""Most registers a thread, as kernels/tail.cuh asks for them: of a form that holds a token by its blocks, of the one
that loops by ranks."""
KERNELS = {1: 8, 2: 10, 4: 10, 8: 10, 16: 10}
"""One, two and four blocks that hold a token, and the block that loops, one-shot and (with peers) two-shot; each with
and without quant."""


def limit(kernel: str, ranks: int) -> int:
    """The registers that a kernel may take, by its mangled name."""
    held = re.search(r"held_tail.*?Li\d+ELi(\d+)E", kernel)
    return REGISTERS["held"][int(held[1])] if held else REGISTERS["looped"][ranks]


def report(text: str) -> list[tuple[str, int, int, int, int]]:
    """(kernel, registers, bytes of local memory, of spill stores, of spill loads) from the compiler's own
    ``-Xptxas -v`` lines."""
    pattern = re.compile(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        re.S,
    )
    return [
        (name, int(used), int(frame), int(out), int(back)) for name, frame, out, back, used in pattern.findall(text)
    ]


@needs_nvcc
@pytest.mark.parametrize(("dtype", "ranks", "architecture"), [
    ("bfloat16", 2, "90a"), ("bfloat16", 2, "100a"), ("float16", 8, "90a"), ("bfloat16", 1, "90a"),
    ("bfloat16", 16, "90a"),
])  # fmt: skip
def test_kernels_compile_without_spills(tmp_path: Path, dtype: str, ranks: int, architecture: str) -> None:
    """Every kernel of a variant stays within its registers, spills nothing and keeps nothing in local memory."""
    done = compile_device(Variant(dtype, ranks, architecture), tmp_path / "launch.o", "-Xptxas", "-v")
    assert done.returncode == 0, done.stderr
    found = [kernel for kernel in report(done.stderr + done.stdout) if "_tail" in kernel[0]]
    assert len(found) == KERNELS[ranks]
    assert [kernel for kernel in found if kernel[1] > limit(kernel[0], ranks) or any(kernel[2:])] == []


@needs_nvcc
def test_a_spill_is_seen_by_the_parser(tmp_path: Path) -> None:
    """The report's parser finds the spills of a kernel that cannot do without them."""
    source = tmp_path / "spill.cu"
    source.write_text(
        "__global__ void __maxnreg__(24) spill_tail(float* p) { float a[64];\n"
        "#pragma unroll\nfor (int i = 0; i < 64; ++i) a[i] = p[i * 32 + threadIdx.x];\n__syncthreads();\n"
        "#pragma unroll\nfor (int i = 0; i < 64; ++i) p[i * 32 + threadIdx.x] = a[63 - i] * a[i]; }\n"
    )
    command = [toolchain.find_nvcc(), "-arch=sm_90", "-Xptxas", "-v", "-c", str(source), "-o", str(tmp_path / "s.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ((_, registers, frame, stores, _),) = report(done.stderr + done.stdout)
    assert registers == 24 and frame > 0 and stores > 0


def test_device_code_is_free_of_any_binding() -> None:
    """Only binding.cc knows the binding, so the kernels can be used without it."""
    users = [path.name for path in SOURCES.iterdir() if "tvm" in path.read_text()]
    assert users == ["binding.cc"]


@pytest.fixture
def fake_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that notes its calls and writes its output file; a cache of its own."""
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(
        '#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\nif [ "$1" = --version ]; then echo fake 1; exit 0; fi\n'
        'if [ -e "$(dirname "$0")/broken" ]; then echo "x.cu(3): error: no such thing" >&2; echo more >&2; exit 2; fi\n'
        'while [ "$#" -gt 1 ]; do [ "$1" = -o ] && out="$2"; shift; done\n[ "$1" = "$out" ] || true\n'
        'echo built > "${out:-$1}"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("MOE_CONFORMANCE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build_module, "find_nvcc", lambda: str(nvcc))
    binding = Binding("1", ("include",), "/lib/libtvm_ffi.so")
    monkeypatch.setattr(build_module, "find_binding", lambda: binding)
    toolchain.compiler_version.cache_clear()
    return nvcc.parent


def compilations(tools: Path) -> int:
    """How often a library was linked."""
    return sum("-shared" in line for line in (tools / "calls").read_text().splitlines())


VARIANT = Variant("bfloat16", 2, "90a")


def test_a_library_is_compiled_once(fake_tools: Path) -> None:
    """A second build finds the first one's file; other flags make another file."""
    first = build(VARIANT)
    assert first.read_text() == "built\n" and build(VARIANT) == first
    assert compilations(fake_tools) == 1
    others = {
        build(Variant("float16", 2, "90a")),
        build(Variant("bfloat16", 4, "90a")),
        build(Variant("bfloat16", 2, "100a")),
        build(Variant("bfloat16", 2, "90a", test_hooks=True)),
    }
    assert len(others | {first}) == 5


def test_the_cache_key_covers_sources_and_compiler(fake_tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed source, compiler or binding is compiled anew, never served from before."""
    first = build(VARIANT)
    monkeypatch.setattr(build_module, "compiler_version", lambda nvcc: "fake 2")
    second = build(VARIANT)
    monkeypatch.setattr(build_module, "find_binding", lambda: Binding("2", (), "/lib/libtvm_ffi.so"))
    third = build(VARIANT)
    assert len({first, second, third}) == 3


def test_builders_at_the_same_time_compile_once(fake_tools: Path) -> None:
    """The lock lets one compile; the others wait and take its library."""
    with ThreadPoolExecutor(4) as pool:
        assert len({*pool.map(build, [VARIANT] * 4)}) == 1
    assert compilations(fake_tools) == 1


def test_a_failed_compilation_is_one_line_and_leaves_no_library(fake_tools: Path) -> None:
    """The compiler's first error is the message; a later build tries again."""
    (fake_tools / "broken").touch()
    with pytest.raises(UnsupportedError, match=r"compiling tail-bfloat16-n2-sm90a failed: .*no such thing") as caught:
        build(VARIANT)
    assert "\n" not in str(caught.value)
    (fake_tools / "broken").unlink()
    assert build(VARIANT).exists()


def test_an_unusable_cache_is_named(fake_tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache folder that cannot be made is reported with the variable that moves it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MOE_CONFORMANCE_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(UnsupportedError, match="MOE_CONFORMANCE_CACHE"):
        build(VARIANT)


def test_a_missing_compiler_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No nvcc anywhere: what to install, and which variable to set."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(toolchain.os, "access", lambda path, mode: False)
    toolchain.find_nvcc.cache_clear()
    with pytest.raises(UnsupportedError, match=r"nvcc .*CUDA_HOME"):
        toolchain.find_nvcc()
    toolchain.find_nvcc.cache_clear()


def test_the_command_line_builds_ahead_of_time(fake_tools: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One library a variant asked for; a failure is one line and status 1."""
    assert main(["build", "--arch", "90a", "--dtype", "bfloat16", "--ranks", "1", "--ranks", "2", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.count(".so") == 2
    (fake_tools / "broken").touch()
    assert main(["build", "--arch", "100a", "--dtype", "float16", "--ranks", "4"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
