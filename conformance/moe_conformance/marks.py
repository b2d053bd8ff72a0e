"""How a conformance test says which clause it is about and which cases it runs on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from moe_conformance.cases.case import Shape

Kind = Literal["consumer", "producer", "pair"]
"""What the test is handed: ``tail`` (TailSubject), ``layer`` (LayerSubject) or ``pair`` (PairSubject)."""
Breadth = Literal["few", "wide"]
"""few: the profile's handful of shapes, for structural rules; wide: its covering array, for numeric ones."""
FIXTURE: dict[Kind, str] = {"consumer": "tail", "producer": "layer", "pair": "pair"}
Where = Callable[[Any], bool]
F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "moe_conformance_test"
"""Of a test function: the fields that its marks have given so far."""


@dataclass(frozen=True)
class ConformanceTest:
    """The metadata of one test function."""

    clause: str
    kind: Kind
    variants: tuple[dict[str, Any], ...] = field(default=({},))
    """Features laid over each of the profile's shapes; one case each."""
    breadth: Breadth = "few"
    where: Where | None = None
    """Which cases the test can say something about; a test on a profile that has none is an error."""


def several_ranks(case: Shape) -> bool:
    """For ``where``: only cases with a reduction, without which nothing is deferred (DEFER-1)."""
    return case.ranks > 1


def any_tokens(case: Shape) -> bool:
    """For ``where``: only calls that launch something (T = 0 is answered before; OUT-2)."""
    return case.tokens > 0


def several_tokens(case: Shape) -> bool:
    """For ``where``: only calls in which one token can be told from another."""
    return case.tokens > 1


def metadata(function: Callable[..., Any]) -> ConformanceTest | None:
    """The metadata of a test function; None where its marks do not give both clause and cases."""
    given: dict[str, Any] = getattr(function, _ATTRIBUTE, {})
    return ConformanceTest(**given) if given.keys() >= {"clause", "kind"} else None


def clause(clause_id: str) -> Callable[[F], F]:
    """The clause that a failure of this test blames first."""

    return _mark(clause=clause_id)


def tails(*variants: dict[str, Any], breadth: Breadth = "few", where: Where | None = None) -> Callable[[F], F]:
    """Runs the test with every consumer on synthetic outputs; it is handed ``tail``."""
    return _cases("consumer", variants, breadth, where)


def layers(*variants: dict[str, Any], breadth: Breadth = "few", where: Where | None = None) -> Callable[[F], F]:
    """Runs the test with every producer on a layer; it is handed ``layer``."""
    return _cases("producer", variants, breadth, where)


def pairs(*variants: dict[str, Any], breadth: Breadth = "few", where: Where | None = None) -> Callable[[F], F]:
    """Runs the test with every producer and consumer together; it is handed ``pair``."""
    return _cases("pair", variants, breadth, where)


def _cases(kind: Kind, variants: tuple[dict[str, Any], ...], breadth: Breadth, where: Where | None) -> Callable[[F], F]:
    return _mark(kind=kind, variants=variants or ({},), breadth=breadth, where=where)


def _mark(**fields: Any) -> Callable[[F], F]:
    def mark(function: F) -> F:
        setattr(function, _ATTRIBUTE, getattr(function, _ATTRIBUTE, {}) | fields)
        return function

    return mark
