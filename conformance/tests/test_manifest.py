"""No test loses its cases unnoticed."""

from __future__ import annotations

import pytest

from moe_conformance.cases.models import models
from moe_conformance.cases.profiles import PROFILE_NAMES, get_profile
from moe_conformance.cases.selection import select_cases
from moe_conformance.manifest import collected, committed, render
from moe_conformance.marks import clause
from moe_conformance.plan import PlanError, suite_test, suite_tests


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
    for test in suite_tests().values():
        for case in select_cases(profile, test.metadata, (2,), 0) if test.metadata.kind == "producer" else ():
            assert (case.hidden_size, case.num_experts, case.method) == (own.hidden_size, own.num_experts, own.method)
            assert case.top_k == (1 if own.method == "llama4" else own.top_k)


def test_test_without_cases_is_refused() -> None:
    """A conformance test says clause and cases; one that says only its clause is an error of the suite, not skipped."""

    @clause("MAP-4")
    def caseless() -> None: ...

    with pytest.raises(PlanError, match="caseless"):
        suite_test("caseless", caseless)
