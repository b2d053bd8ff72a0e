"""No test loses its cases unnoticed."""

from __future__ import annotations

import pytest

from moe_conformance.cases.models import models
from moe_conformance.cases.profiles import PROFILE_NAMES, get_profile
from moe_conformance.cases.selection import select_cases
from moe_conformance.manifest import collected, committed, render
from moe_conformance.marks import metadata
from moe_conformance.plan import suite_tests


def test_manifest_is_that_of_the_suite() -> None:
    """Collected is committed; otherwise run python -m moe_conformance.manifest, and say why in the changelog."""
    assert render(collected()) == render(committed())


@pytest.mark.parametrize("profile", PROFILE_NAMES)
def test_every_test_has_a_case_in_every_profile(profile: str) -> None:
    """A conformance test that no profile runs proves nothing."""
    assert [name for name, count in committed()[profile].items() if not count] == []


@pytest.mark.parametrize("model", models())
def test_model_profile_keeps_the_models_own_layer(model: str) -> None:
    """Every producer case of a model profile has the model's sizes and routing."""
    profile, own = get_profile(f"model:{model}"), models()[model]
    for function in suite_tests().values():
        test = metadata(function)
        if test is None or test.kind != "producer":
            continue
        for case in select_cases(profile, test, (2,), 0):
            assert (case.hidden_size, case.num_experts, case.method) == (own.hidden_size, own.num_experts, own.method)
            assert case.top_k == (1 if own.method == "llama4" else own.top_k)
