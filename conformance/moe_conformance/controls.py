"""Negative controls: results that are wrong on a case's own data must be rejected by the case's own predicate."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.judge import error_ratio
from moe_conformance.oracle import Truth, route_terms
from moe_conformance.tail_data import TailInputs
from moe_conformance.verdicts import VacuousCaseError
from moe_contract import MoEOutput


def require_controls_rejected(inputs: TailInputs, truth: Truth, *, exact: bool) -> None:
    """Raises VacuousCaseError when zeros, a dropped expert or two swapped rows would be accepted."""
    if truth.value.numel() == 0:
        return
    wrong = {"zeros": torch.zeros_like(truth.value)}
    for rank, output in enumerate(inputs.outputs):
        if isinstance(output.routed, Tensor):
            continue
        changes = _changes(output)
        wrong |= {f"{name} on rank {rank}": truth.value + delta for name, delta in changes.items()}
        break
    for name, result in wrong.items():
        if bool(truth.value.isfinite().all()) and not bool((error_ratio(result, truth, exact=exact) > 1.0).any()):
            raise VacuousCaseError(f"negative control {name!r} was accepted: this case could not have failed")


def _changes(output: MoEOutput) -> dict[str, Tensor]:
    """What leaving out one expert, and swapping two rows, adds to the result ``[T, H]``; empty where not possible."""
    terms = route_terms(output)
    index = output.routed.expanded_idx_to_permuted_idx
    scale = float(output.routed_scaling_factor)
    magnitude = terms.abs().sum(-1)
    changes: dict[str, Tensor] = {}
    if bool((magnitude > 0).any()):
        token, slot = divmod(int(magnitude.argmax()), index.shape[1])
        dropped = torch.zeros_like(terms[:, 0])
        dropped[token] = -scale * terms[token, slot]
        changes["one dropped expert"] = dropped
    swapped = _swap(output, terms, magnitude)
    if swapped is not None:
        changes["two swapped rows"] = scale * swapped
    return changes


def _swap(output: MoEOutput, terms: Tensor, magnitude: Tensor) -> Tensor | None:
    """The two slots whose terms differ most in weight change places in the map."""
    flat = (magnitude.reshape(-1) > 0).nonzero().reshape(-1)
    if flat.numel() < 2:
        return None
    weights = output.routed.expert_weights.reshape(-1).double()[flat]
    first, second = int(flat[weights.argmax()]), int(flat[weights.argmin()])
    if first == second:
        second = int(flat[-1])
    if first == second or float(weights.max()) == float(weights.min()):
        return _swap_between_tokens(output, terms, flat)
    return _swapped(output, terms, first, second)


def _swap_between_tokens(output: MoEOutput, terms: Tensor, flat: Tensor) -> Tensor | None:
    """With equal weights a swap within a token changes nothing, so the slots are of two tokens."""
    top_k = terms.shape[1]
    other = flat[flat // top_k != flat[0] // top_k]
    return _swapped(output, terms, int(flat[0]), int(other[-1])) if other.numel() else None


def _swapped(output: MoEOutput, terms: Tensor, first: int, second: int) -> Tensor:
    top_k = terms.shape[1]
    index = output.routed.expanded_idx_to_permuted_idx.reshape(-1).long()
    weights = output.routed.expert_weights.reshape(-1).double()
    rows = output.routed.gemm2_permuted
    change = torch.zeros_like(terms[:, 0])
    for slot, other in ((first, second), (second, first)):
        difference = rows[index[other]].double() - rows[index[slot]].double()
        change[slot // top_k] += weights[slot] * difference
    return change
