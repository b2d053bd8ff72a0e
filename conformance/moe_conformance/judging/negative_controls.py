"""Negative controls: results that are wrong on a case's own data must be rejected by the case's own predicate."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.cases.tail_data import TailInputs
from moe_conformance.judging.judge import error_ratio
from moe_conformance.truth.tail_oracle import Truth, route_terms
from moe_conformance.verdicts import VacuousCaseError
from moe_contract import MoEOutput
from moe_contract.outputs import require_unfinalized


def require_controls_rejected(inputs: TailInputs, truth: Truth, *, exact: bool) -> None:
    """Raises VacuousCaseError when zeros, a dropped expert or two swapped rows would be accepted."""
    if truth.value.numel() == 0:
        return
    wrong = {"zeros": torch.zeros_like(truth.value)}
    # A tensor-parallel layer has each expert on every rank, so an expert that is dropped is dropped on all of them.
    for output in inputs.outputs:
        if not isinstance(output.routed, Tensor):
            for name, delta in _changes(output).items():
                wrong[name] = wrong.get(name, truth.value) + delta
    for name, result in wrong.items():
        if bool(truth.value.isfinite().all()) and not bool((error_ratio(result, truth, exact=exact) > 1.0).any()):
            raise VacuousCaseError(f"negative control {name!r} was accepted: this case could not have failed")


def _changes(output: MoEOutput) -> dict[str, Tensor]:
    """What leaving out one expert of each token, and swapping two rows of each, adds to the result ``[T, H]``.

    Empty where a token has too few experts on this rank for any change.
    """
    terms = route_terms(output)
    scale = float(output.routed_scaling_factor)
    magnitude = terms.abs().sum(-1)
    if not bool((magnitude > 0).any()):
        return {}
    largest = magnitude.argmax(1)
    changes = {"one dropped expert": -scale * terms[torch.arange(len(largest)), largest]}
    several = len(largest) > 1
    swapped = _swapped_between_tokens(terms, largest) if several else _swapped_rows(output, magnitude > 0)
    if bool((swapped != 0).any()):
        changes["two swapped rows"] = scale * swapped
    return changes


def _swapped_rows(output: MoEOutput, there: Tensor) -> Tensor:
    """``[T, H]``: in each token the rows of the largest and the smallest weight change places.

    Only where one weight is twice the other: rows of nearly equal weights may change places with hardly a trace.
    """
    routed = require_unfinalized(output)
    weights = routed.expert_weights.double()
    index = routed.expanded_idx_to_permuted_idx.long().clamp(min=0)
    token = torch.arange(weights.shape[0])
    high = torch.where(there, weights, -torch.inf).argmax(1)
    low = torch.where(there, weights, torch.inf).argmin(1)
    rows = routed.gemm2_permuted
    difference = rows[index[token, low]].double() - rows[index[token, high]].double()
    weight = weights[token, high] - weights[token, low]
    usable = there.any(1) & (weight > weights[token, high] / 2)
    return torch.where(usable.unsqueeze(1), weight.unsqueeze(1) * difference, 0.0)


def _swapped_between_tokens(terms: Tensor, largest: Tensor) -> Tensor:
    """``[T, H]``: each token trades its largest term with the next, which shows whatever the weights are."""
    own = terms[torch.arange(len(largest)), largest]
    return own.roll(1, 0) - own
