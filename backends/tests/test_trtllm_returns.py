"""Every return form of every known version becomes the tensor or the triple; anything else is named and refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_backends.trtllm.returns import (
    Entry,
    EntryCall,
    ReturnFormError,
    RoutingInput,
    finalized,
    mislabelled,
    unfinalized,
)
from moe_backends.trtllm.signatures import recorded
from moe_backends.trtllm.versions import NEWEST, OLDEST, Version, known

T, K, H = 5, 3, 8
VERSIONS = list(recorded())
CURRENT = Version(0, 6, 18)
FIRST_RIGHT = {False: Version(0, 6, 16), True: Version(0, 6, 15)}
"""First version, by whether the entry is NVFP4, whose float32 logits give weights with the right label."""


def _call(version: Version = CURRENT, entry: Entry = Entry.BF16, **changes: Any) -> EntryCall:
    fields = {"routing": RoutingInput.LOGITS, "num_tokens": T, "top_k": K, "logits_dtype": torch.float32}
    return EntryCall(version, entry, **{**fields, **changes})


def _rows() -> Tensor:
    return torch.randn(16, H).to(torch.bfloat16)


def _weights() -> Tensor:
    return torch.rand(T, K).to(torch.bfloat16)


def _flat_map() -> Tensor:
    return torch.randperm(T * K).to(torch.int32)


def _as_float32(weights: Tensor) -> Tensor:
    """bfloat16 bytes at the front of a buffer that says float32, as the mislabelling versions return them."""
    buffer = torch.full(weights.shape, torch.nan)
    buffer.view(torch.bfloat16).view(-1)[: weights.numel()] = weights.flatten()
    return buffer


@pytest.mark.parametrize("version", VERSIONS, ids=str)
@pytest.mark.parametrize("entry", Entry)
def test_finalized_forms_give_the_tensor(version: Version, entry: Entry) -> None:
    """A bare tensor, a list of one and a tuple of one give the tensor itself, in every version."""
    output = torch.randn(T, H).to(torch.bfloat16)
    for form in (output, [output], (output,)):
        assert finalized(form, _call(version, entry)) is output


@pytest.mark.parametrize("version", VERSIONS, ids=str)
@pytest.mark.parametrize("entry", [Entry.BF16, Entry.FP4])
def test_weights_are_read_as_what_they_are(version: Version, entry: Entry) -> None:
    """Inside the window a float32 label is reinterpreted, outside it is refused; bfloat16 is taken in every version."""
    weights, call = _weights(), _call(version, entry)
    inside = mislabelled(call)
    assert inside == (version < FIRST_RIGHT[entry.fp4] and (entry.fp4 or version >= Version(0, 6, 8)))
    right = unfinalized([_rows(), weights, _flat_map()], call)
    assert torch.equal(right.expert_weights, weights)
    wrong = [_rows(), _as_float32(weights), _flat_map()]
    if inside:
        assert torch.equal(unfinalized(wrong, call).expert_weights, weights)
        assert unfinalized(wrong, call).expert_weights.data_ptr() == wrong[1].data_ptr(), "reinterpreted, not copied"
    else:
        with pytest.raises(ReturnFormError, match=rf"{version}.*{entry.value}.*WGT-3"):
            unfinalized(wrong, call)


@pytest.mark.parametrize("routing", [RoutingInput.LOGITS, RoutingInput.PACKED])
def test_float32_label_without_float32_logits_is_refused(routing: RoutingInput) -> None:
    """The buffer takes the logits' dtype: with bfloat16 or no logits a float32 label has another cause."""
    call = _call(Version(0, 6, 13), routing=routing, logits_dtype=torch.bfloat16)
    with pytest.raises(ReturnFormError, match="WGT-3"):
        unfinalized([_rows(), _as_float32(_weights()), _flat_map()], call)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_separate_weights_come_back_in_the_callers_dtype(dtype: torch.dtype) -> None:
    """With ids and weights given apart, the caller's own tensor is handed on."""
    weights = torch.rand(T, K).to(dtype)
    call = _call(entry=Entry.BF16_ROUTED, routing=RoutingInput.SEPARATE, given_weights_dtype=dtype)
    assert unfinalized([_rows(), weights, _flat_map()], call).expert_weights is weights


@pytest.mark.parametrize("shape", [(T * K,), (T, K)])
def test_map_gets_two_dimensions_without_a_copy(shape: tuple[int, ...]) -> None:
    """Flat or [T, K], int32: the same memory, token-major."""
    flat = _flat_map()
    output = unfinalized((_rows(), _weights(), flat.view(shape)), _call())
    assert output.expanded_idx_to_permuted_idx.shape == (T, K)
    assert output.expanded_idx_to_permuted_idx.data_ptr() == flat.data_ptr()


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (torch.zeros(T * (K + 1), dtype=torch.int32), r"15 entries, got 20: fused shared experts"),
        (torch.zeros(T, K + 1, dtype=torch.int32), r"15 entries, got 20"),
        (torch.zeros(K, T, dtype=torch.int32), r"\[5, 3\], got a tensor \[3, 5\]"),
        (torch.zeros(T * K, dtype=torch.int64), "int32 map, got a tensor"),
        (torch.zeros(T * K * 2, dtype=torch.int32)[::2], "contiguous"),
    ],
)
def test_map_of_another_form_is_refused(index: Tensor, message: str) -> None:
    """K + 1 slots, slot-major, int64 or strided: both sizes are named, nothing is reshaped."""
    with pytest.raises(ReturnFormError, match=message):
        unfinalized([_rows(), _weights(), index], _call())


@pytest.mark.parametrize(
    "form",
    [
        None,
        torch.zeros(T, H),
        [],
        [_rows()],
        [_rows(), _weights()],
        [_rows(), _weights(), _flat_map(), _rows()],
        [_rows(), _weights(), None],
        {"output": _rows()},
    ],
    ids=["none", "tensor", "nothing", "one", "two", "four-with-lora", "none-inside", "dict"],
)
def test_unknown_unfinalized_form_names_version_entry_and_form(form: object) -> None:
    """Nothing is guessed from a length: four tensors with a LoRA delta, or three that are a finalized form."""
    with pytest.raises(
        ReturnFormError, match=r"flashinfer 0\.6\.18 trtllm_bf16_moe \(logits\): expected three tensors"
    ):
        unfinalized(form, _call())


@pytest.mark.parametrize("form", [None, [], [_rows(), _flat_map(), _rows()], "output"])
def test_unknown_finalized_form_is_refused(form: object) -> None:
    """do_finalize=True with a LoRA delta gives three tensors, which are not the triple."""
    with pytest.raises(ReturnFormError, match="do_finalize=True"):
        finalized(form, _call())


@pytest.mark.parametrize("text", ["0.6.5", "0.7.5", "0.8.0", "1.0.0"])
def test_unknown_version_is_refused(text: str) -> None:
    """A version whose forms were not read is refused before its result is looked at."""
    call = _call(Version.parse(text))
    assert not known(call.version)
    for normalise in (finalized, unfinalized):
        with pytest.raises(ReturnFormError, match=text):
            normalise([_rows()], call)


def test_versions_sort_as_releases_do() -> None:
    """Candidates before their release, post releases after it; local parts do not count."""
    texts = ["0.6.8rc1", "0.6.8", "0.6.8.post1", "0.6.10", "0.6.18", "0.6.18.post1", "0.7.0"]
    versions = [Version.parse(text) for text in texts]
    assert versions == sorted(versions)
    assert [str(version) for version in versions] == texts
    assert Version.parse("0.7.2+cu130") == Version(0, 7, 2)
    assert OLDEST < Version(0, 6, 18) < NEWEST
    with pytest.raises(ValueError, match="expected a FlashInfer version"):
        Version.parse("main")


def test_a_range_ends_after_its_last_post_release() -> None:
    """Post releases of the newest version are known, a candidate of the next is not."""
    after = NEWEST._replace(micro=NEWEST.micro + 1, pre=0)
    assert known(NEWEST._replace(post=99)) and not known(after)
    assert Version.parse("0.6.15.post1") < Version(0, 6, 15).with_posts < Version.parse("0.6.16rc0")
    assert [str(Version.parse(text)) for text in ("0.6.15rc1", "0.6.15.post1")] == ["0.6.15rc1", "0.6.15.post1"]
