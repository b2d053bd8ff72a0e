"""The host's side of an eager call, with a library that records instead of launching: no GPU."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_backends.cuda import DECLARATION, CudaTail, Engine, Form, configs, eager, workspace
from moe_backends.cuda.build import Variant
from moe_backends.cuda.library import Library
from moe_contract import (
    ContractViolation,
    MoEOutput,
    PeerTimeoutError,
    QuantFormat,
    QuantRecipe,
    TailCapacity,
    UnfinalizedMoEOutput,
    UnsupportedError,
)

T, H, K = 4, 64, 2
BF16 = torch.bfloat16


class Recorder:
    """A tail whose launches are noted: the argument lists of kernels/binding.cc's ``run``."""

    def __init__(self) -> None:
        self.runs: list[tuple[Any, ...]] = []
        capacity = TailCapacity(8, H, K, BF16)
        library = Library(Variant("bfloat16", 1, "90a"), *(lambda *_: 0 for _ in range(3)), self._note)
        group: Any = SimpleNamespace(rank=0, size=1, device=torch.device("cpu"))
        self.report = torch.zeros(ctypes.sizeof(workspace._Report), dtype=torch.uint8)
        space = workspace.Workspace(group, 8, [], torch.zeros(9, dtype=torch.int32), self.report, torch.zeros(3))
        shape = configs.Config(Form(), 32, 264, 264)
        self.tail = CudaTail(DECLARATION, capacity, Engine(library, space, capacity, (shape,), 77), 4)

    def _note(self, *arguments: Any) -> None:
        self.runs.append(arguments)

    def inputs_of(self, run: int) -> tuple[Any, ...]:
        """What a launch was given, but for the outputs' addresses."""
        return self.runs[run][:9] + self.runs[run][13:]


@pytest.fixture(params=["torch's guards", "plain"])
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """With torch's private guards, and as with a version that has none."""
    if request.param == "plain":
        monkeypatch.setattr(eager, "TensorGuards", None)
    elif eager.TensorGuards is None:
        pytest.skip("this torch has no TensorGuards")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 123, raising=False)
    return Recorder()


def rows(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Normal data."""
    return torch.randn(shape).to(dtype)


def arguments(shared: bool = True) -> dict[str, Any]:
    """Those of a call that nothing is wrong with."""
    index = torch.arange(T * K, dtype=torch.int32).view(T, K)
    triple = UnfinalizedMoEOutput(rows(T * K + 1, H), rows(T, K), index)
    output = MoEOutput(triple, rows(T, H) if shared else None, 2.5)
    return {"output": output, "residual": rows(T, H), "norm_weight": rows(H), "eps": 1e-6}


def with_triple(given: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The same with other routed tensors."""
    return given | {"output": replace(given["output"], routed=replace(given["output"].routed, **fields))}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("recipe", [None, QuantRecipe(QuantFormat.FP8_STATIC, scale=0.5)], ids=str)
def test_a_repeated_call_launches_what_the_first_launched(
    recorder: Recorder, shared: bool, recipe: QuantRecipe | None
) -> None:
    """The short way hands the library the same arguments, and its own outputs."""
    given = arguments(shared) | {"quant": recipe, "weight_bias": 1.0}
    outputs = [recorder.tail(**given) for _ in range(2)]
    assert recorder.tail._memory.find(given["output"], given["residual"], given["norm_weight"], recipe) is not None
    assert recorder.inputs_of(0) == recorder.inputs_of(1)
    triple, residual = given["output"].routed, given["residual"]
    read = (triple.gemm2_permuted, triple.expert_weights, triple.expanded_idx_to_permuted_idx,
            given["output"].shared_output, residual, given["norm_weight"])  # fmt: skip
    addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in read)
    argument = 0.5 if recipe else 1.0
    code = 1 if recipe else 0
    assert recorder.inputs_of(1) == (77, -1, T, *addresses, code, 4, False, False, 2.5, 1e-6, 1.0, argument, 123)
    for run, out in zip(recorder.runs, outputs, strict=True):
        made = (out.residual_out, out.norm_out, out.quant_out, out.quant_scale)
        assert run[9:13] == tuple(0 if tensor is None else tensor.data_ptr() for tensor in made)
    assert outputs[0].residual_out.data_ptr() != outputs[1].residual_out.data_ptr()


BROKEN: dict[str, Any] = {
    "residual of another dtype": lambda g: g | {"residual": g["residual"].float()},
    "residual of another width": lambda g: g | {"residual": rows(T, H - 8)},
    "residual of one dimension": lambda g: g | {"residual": rows(T)},
    "residual without dimension": lambda g: g | {"residual": torch.zeros((), dtype=BF16)},
    "residual that is no tensor": lambda g: g | {"residual": None},
    "residual elsewhere": lambda g: g | {"residual": torch.empty(T, H, dtype=BF16, device="meta")},
    "norm weight too long": lambda g: g | {"norm_weight": rows(H + 8)},
    "norm weight that is no tensor": lambda g: g | {"norm_weight": [1.0] * H},
    "rows of another dtype": lambda g: with_triple(g, gemm2_permuted=rows(T * K, H).half()),
    "rows with strides": lambda g: with_triple(g, gemm2_permuted=rows(T * K, 2 * H)[:, ::2]),
    "rows that record gradients": lambda g: with_triple(g, gemm2_permuted=rows(T * K, H).requires_grad_()),
    "rows that are no tensor": lambda g: with_triple(g, gemm2_permuted="rows"),
    "weights of another top-k": lambda g: with_triple(g, expert_weights=rows(T, K + 1)),
    "weights of float64": lambda g: with_triple(g, expert_weights=torch.zeros(T, K, dtype=torch.float64)),
    "map of int64": lambda g: with_triple(g, expanded_idx_to_permuted_idx=torch.zeros(T, K, dtype=torch.int64)),
    "shared output of another size": lambda g: g | {"output": replace(g["output"], shared_output=rows(T + 1, H))},
    "scale that is not finite": lambda g: g | {"output": replace(g["output"], routed_scaling_factor=float("nan"))},
    "scale that is a tensor": lambda g: g | {"output": replace(g["output"], routed_scaling_factor=torch.tensor(2.5))},
    "recipe without scale": lambda g: g | {"quant": QuantRecipe(QuantFormat.FP8_STATIC, scale=0.0)},
}  # fmt: skip


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_call_is_refused_after_a_good_one(recorder: Recorder, broken: str) -> None:
    """What was checked once vouches for nothing else: refused, and nothing launched."""
    given = arguments()
    for _ in range(2):
        recorder.tail(**given)
    with pytest.raises((ContractViolation, UnsupportedError)):
        recorder.tail(**BROKEN[broken](given))
    assert len(recorder.runs) == 2
    recorder.tail(**given)
    assert len(recorder.runs) == 3


LEGAL: dict[str, Any] = {
    "float32 weights": (lambda g: with_triple(g, expert_weights=rows(T, K, dtype=torch.float32)), (15, True)),
    "float32 norm weight": (lambda g: g | {"norm_weight": rows(H, dtype=torch.float32)}, (16, True)),
    "another scale": (lambda g: g | {"output": replace(g["output"], routed_scaling_factor=1.0)}, (17, 1.0)),
    "another eps": (lambda g: g | {"eps": 1e-5}, (18, 1e-5)),
    "no shared output": (lambda g: g | {"output": replace(g["output"], shared_output=None)}, (6, 0)),
    "a recipe": (lambda g: g | {"quant": QuantRecipe(QuantFormat.FP8_PER_TOKEN)}, (13, 2)),
}  # fmt: skip


@pytest.mark.parametrize("legal", LEGAL)
def test_another_legal_call_is_launched_as_what_it_is(recorder: Recorder, legal: str) -> None:
    """Before, after and between calls of another kind, by the short way as by the long one."""
    change, (place, value) = LEGAL[legal]
    given = arguments()
    for _ in range(2):
        recorder.tail(**given)
        recorder.tail(**change(given))
    assert recorder.runs[1][place] == recorder.runs[3][place] == value
    assert recorder.runs[0][place] == recorder.runs[2][place] != value
    assert recorder.inputs_of(0) == recorder.inputs_of(2)


def test_a_tensor_off_the_boundary_is_copied(recorder: Recorder) -> None:
    """Of the same shape as one that was not: 16-byte accesses need the copy each time."""
    given = arguments()
    recorder.tail(**given)
    shifted = torch.zeros(T * H + 1, dtype=BF16)[1:].view(T, H)
    recorder.tail(**given | {"residual": shifted})
    assert shifted.data_ptr() % 16 and recorder.runs[1][7] % 16 == 0


def test_outputs_are_dense_for_a_residual_with_strides(recorder: Recorder) -> None:
    """The kernel writes rows of H elements, whatever the residual's layout was."""
    given = arguments() | {"residual": rows(H, T).t()}
    out = recorder.tail(**given)
    assert out.residual_out.is_contiguous() and out.norm_out.is_contiguous()


def test_no_token_launches_nothing(recorder: Recorder) -> None:
    """And is answered with empty outputs, however often."""
    for _ in range(2):
        out = recorder.tail(MoEOutput(rows(0, H)), rows(0, H), rows(H), eps=1e-6)
        assert out.norm_out.shape == (0, H)
    assert recorder.runs == []


def test_a_remembered_call_keeps_no_tensor_alive(recorder: Recorder) -> None:
    """Activations are freed as without the memory."""
    given = arguments()
    recorder.tail(**given)
    seen = weakref.ref(given["residual"])
    del given
    assert seen() is None


def test_a_lost_peer_and_a_closed_tail_end_the_short_way(recorder: Recorder) -> None:
    """RED-6 is looked at before every launch."""
    given = arguments()
    recorder.tail(**given)
    recorder.report.view(torch.int32)[0] = 1
    with pytest.raises(PeerTimeoutError):
        recorder.tail(**given)
    recorder.report.zero_()
    recorder.tail.close()
    with pytest.raises(RuntimeError, match="this tail is closed"):
        recorder.tail(**given)
    assert len(recorder.runs) == 1


def test_memory_is_bounded(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the limits calls are checked each time and launched all the same."""
    monkeypatch.setattr(eager, "MOST_KINDS", 2)
    given = arguments()
    for scale in (1.0, 2.0, 3.0, 4.0, 4.0):
        recorder.tail(**given | {"output": replace(given["output"], routed_scaling_factor=scale)})
    assert [run[17] for run in recorder.runs] == [1.0, 2.0, 3.0, 4.0, 4.0]
    assert len(recorder.tail._memory._kinds[T]) == 2
