"""The registry holds exactly the published clauses, and says so when asked for another."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from moe_contract import Clause, UnknownClauseError, get_clause
from moe_contract.clauses import families, registry

PUBLISHED = {
    "ROWS": 6,
    "WGT": 4,
    "MAP": 6,
    "OUT": 5,
    "SCALE": 3,
    "SHARED": 2,
    "DEFER": 6,
    "RED": 6,
    "NORM": 2,
    "QUANT": 1,
    "NUM": 2,
    "CAP": 2,
    "GRAPH": 2,
}
"""How many clauses each family of the released contract has, in the order of the specification."""
REPORT = re.compile(r"[\w.-]+#\d+")
NOT_NUMBERED = {"TensorRT-LLM NVFP4 device test", "vllm FP8 monolithic"}
"""Public cases that have no issue number."""


def test_registry_is_complete_and_in_order() -> None:
    """Every published id is there, in the order of the specification, and no other."""
    assert list(registry()) == [f"{family}-{n}" for family, size in PUBLISHED.items() for n in range(1, size + 1)]
    assert list(families()) == list(PUBLISHED)


def test_registry_is_read_once_and_cannot_be_changed() -> None:
    """Callers share one registry, so none of them may write to it."""
    assert registry() is registry()
    with pytest.raises(TypeError):
        registry()["MAP-9"] = get_clause("MAP-1")
    with pytest.raises(ValidationError):
        get_clause("MAP-1").text = ""


@pytest.mark.parametrize("clause", registry().values(), ids=list(registry()))
def test_clause_explains_itself(clause: Clause) -> None:
    """Rule, reason and advice are sentences, and every report can be looked up."""
    for sentence in (clause.text, clause.why, clause.look_first):
        assert sentence.endswith("."), sentence
    assert all(REPORT.fullmatch(case) or case in NOT_NUMBERED for case in clause.real_cases)


def test_only_compilation_is_optional() -> None:
    """All clauses are MUST but GRAPH-2."""
    assert [clause.id for clause in registry().values() if clause.level == "SHOULD"] == ["GRAPH-2"]


@pytest.mark.parametrize(
    ("asked", "meant"), [("map-4", "MAP-4"), ("MAP4", "MAP-4"), ("SCALES-1", "SCALE-1"), ("CAPABILITY-1", "CAP-1")]
)
def test_unknown_clause_suggests_the_nearest(asked: str, meant: str) -> None:
    """A mistyped id is answered in one line with the id that was probably meant."""
    with pytest.raises(UnknownClauseError) as caught:
        get_clause(asked)
    message = str(caught.value)
    assert asked in message and meant in message and "\n" not in message


def test_unknown_clause_far_from_any_lists_the_families() -> None:
    """Where no id is near, the message shows what ids look like."""
    with pytest.raises(LookupError, match=r"'zzz'; ids look like 'ROWS-1' \(families: ROWS, WGT, MAP"):
        get_clause("zzz")


def test_clause_of_another_family_is_refused() -> None:
    """An id and its family cannot disagree."""
    record = get_clause("MAP-1").model_dump() | {"family": "ROWS"}
    with pytest.raises(ValidationError, match="must be ROWS-<number>"):
        Clause(**record)
