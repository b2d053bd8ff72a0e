"""Failures as their reader sees them: what is grouped, what accounts for what, and the command that repeats it."""

from __future__ import annotations

from typing import Any

import pytest

from moe_conformance.report.attribution import explain_failures
from moe_conformance.report.failures import group_failures, reproduce
from moe_conformance.report.model import CaseResult, Selection
from moe_conformance.verdicts import Verdict
from moe_contract import Violation
from moe_contract.clauses import registry

from .report_factory import ABSENT, failure, printed, report_of, result


def test_failure_says_clause_backend_sizes_place_values_cause_and_what_to_do() -> None:
    """A failure reads as the documents show it."""
    text = printed(report_of(failure(number=3)))
    header, *rest = text.splitlines()
    assert header == "FAIL  MAP-4  consumer acme-tail  T=17 K=8 H=2048 tp=2 bf16 seed=3   rank 1,"
    assert rest[0] == "      token 16, column 40"
    assert "      residual_out: got 3.5  expected 2  bound 0.0078" in rest
    assert "      slot 5 is -1: the last row was read as this slot's row" in rest
    assert "      more: moe-conformance explain MAP-4" in rest
    command = "moe-conformance run --consumer acme-tail --clause MAP-4 --profile smoke"
    assert f"      reproduce: {command}" in rest
    flowing = " ".join(text.split())
    assert registry()["MAP-4"].text in flowing


def test_cases_that_fail_in_the_same_way_are_one_group() -> None:
    """Slot numbers and ranks in a hint do not split a group; another hint does."""
    other = ABSENT.model_copy(
        update={"hint": "slot 2 of rank 1 (and 3 more) is -1: the last row was read as this slot's row"}
    )
    different = ABSENT.model_copy(update={"hint": "a slot of -1 let its NaN weight reach the result"})
    groups = group_failures([failure(number=1), failure("NUM-1", other, 2), failure(violation=different, number=3)])
    assert [len(group.cases) for group in groups] == [2, 1]
    assert "2 cases end like this; by tested clause: MAP-4 1, NUM-1 1" in printed(report_of(*groups[0].cases))


def test_pair_that_fails_as_its_consumer_does_alone_is_the_same_group() -> None:
    """A consumer's fault is not told again for every producer it is paired with."""
    pairs = [failure("NUM-1", number=n, producer=name) for n, name in enumerate(("p", "q"))]
    (group,) = group_failures([*pairs, failure(number=7)])
    assert group.subject == "consumer acme-tail"
    text = " ".join(printed(report_of(*pairs, failure(number=7))).split())
    assert "3 cases end like this, 2 of them in pairs with p, q" in text


def test_errors_are_grouped_over_clauses_and_blame_none() -> None:
    """A crash is no clause's failure."""
    cases = [result(clause, Verdict.ERROR, reason="acme-tail raised KeyError: 'x'") for clause in ("MAP-4", "NUM-1")]
    (group,) = group_failures(cases)
    assert (group.clause, len(group.cases)) == ("", 2)
    assert "explain" not in printed(report_of(*cases))


def test_undiagnosed_composite_failure_is_explained_by_the_clause_its_backend_breaks() -> None:
    """A failed NUM-1 case with absent experts is counted under MAP-4 when the same consumer fails MAP-4's own test."""
    vague = Violation(clause="NUM-1", field="residual_out", got="1", expected="2")
    composite = failure("NUM-1", vague, case={"absent": "quarter", "ranks": 2})
    explained = explain_failures([composite, failure()])
    assert explained[0].explained_by == "MAP-4" and explained[0].blamed == "MAP-4"
    text = printed(report_of(*explained))
    assert "accounts for 1 failures of composite tests too: NUM-1 1" in text


@pytest.mark.parametrize(
    ("case", "own"),
    [({"absent": "none"}, failure()), ({"absent": "quarter"}, failure(consumer="another"))],
    ids=["without-the-feature", "another-backend"],
)
def test_failure_stays_unexplained_without_feature_or_by_another_backend(case: dict[str, str], own: CaseResult) -> None:
    """A clause accounts for a failure only on cases that exercise it and of the backend that breaks it."""
    vague = Violation(clause="NUM-1", field="residual_out", got="1", expected="2")
    composite = failure("NUM-1", vague, case=case)
    assert explain_failures([composite, own])[0].explained_by is None


def test_diagnosed_failure_is_not_explained_again() -> None:
    """What the diagnosis blames stays blamed."""
    diagnosed = failure("NUM-1", Violation(clause="SHARED-1", field="x", got="1", expected="2"), case={"absent": "all"})
    assert explain_failures([diagnosed, failure()])[0].blamed == "SHARED-1"


def test_reproduce_names_what_the_run_was_given() -> None:
    """Sizes, device and seed appear only where they were not the defaults; the clause is the test's own."""
    selection = Selection(
        profile="core", producers=(), consumers=(), ranks=(2, 4), ranks_given=True, device="cuda", seed=3
    )
    case = failure("NUM-1", producer="my module:it")
    expected = (
        "moe-conformance run --producer 'my module:it' --consumer acme-tail --clause NUM-1 --profile core "
        "--tp 2,4 --device cuda --seed 3"
    )
    assert reproduce(case, selection) == expected


def _sized(number: int, clause: str = "MAP-4", **fields: Any) -> CaseResult:
    """A failure blamed on MAP-4 with the sizes of a small consumer's case, but for ``fields``."""
    names = {"producer": fields.pop("producer", None)}
    sizes = {"tokens": 5, "ranks": 1, "top_k": 4, "hidden_size": 256, "dtype": "bfloat16", **fields}
    return failure(clause, number=number, case=sizes, **names)


@pytest.mark.parametrize(
    "harder",
    [
        {"tokens": 6},
        {"ranks": 2},
        {"top_k": 8},
        {"hidden_size": 512},
        {"absent": "quarter", "tokens": 1},
        {"producer": "p", "tokens": 1},
        {"clause": "NUM-1"},
        {"num_experts": 16, "intermediate_size": 32, "method": "deepseek-v3", "tokens": 1},
    ],
    ids=str,
)
def test_simplest_case_is_shown(harder: dict[str, Any]) -> None:
    """Whichever ran first: alone before in a pair, without variants, then few tokens, ranks, slots and columns."""
    simple = _sized(7)
    (group,) = group_failures([_sized(1, **harder), simple, _sized(2, **harder)])
    assert group.shown == simple


def test_commands_say_when_another_clauses_test_found_it() -> None:
    """The blamed clause is explained, and the clause whose test found it is run."""
    text = printed(report_of(failure("NUM-1")), width=200)
    assert "more: moe-conformance explain MAP-4\n" in text
    assert "reproduce (found by the test of NUM-1): moe-conformance run --consumer acme-tail --clause NUM-1 " in text


def test_reproduce_runs_both_clauses_where_one_accounts_for_the_other() -> None:
    """Without the blamed clause's own failure the case would be blamed on its own clause."""
    explained = failure("NUM-1", explained_by="SCALE-1")
    selection = Selection(profile="core", producers=(), consumers=(), ranks=(1,), timeout_s=2.5)
    assert reproduce(explained, selection) == (
        "moe-conformance run --consumer acme-tail --clause NUM-1 --clause SCALE-1 --profile core --timeout 2.5"
    )
