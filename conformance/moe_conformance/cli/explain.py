"""``moe-conformance explain CLAUSE``."""

from __future__ import annotations

import inspect
import textwrap

from rich.text import Text

from moe_conformance.cli.selection import check_clause
from moe_conformance.plan import suite_tests
from moe_conformance.report.terminal import make_console
from moe_contract import get_clause

LABEL_WIDTH = 12
"""Of ``look first``, the longest label, and two spaces."""


def explain_command(clause_id: str) -> None:
    """Prints everything the registry and the suite say about a clause."""
    clause_id = check_clause(clause_id)
    clause = get_clause(clause_id)
    profiles = ", ".join(profile.value for profile in clause.profile)
    facts = {
        "text": clause.text,
        "side": {"both": "producer and consumer", "engine": "the code that joins the two"}.get(
            clause.side, clause.side
        ),
        "level": clause.level,
        "since": f"contract {clause.since}",
        "judged by": f"rounding profile {profiles}" if profiles else "",
        "why": clause.why,
        "look first": clause.look_first,
        "real cases": ", ".join(clause.real_cases),
    }
    console = make_console()
    console.print(Text(clause.id, style="bold"))
    for label, value in facts.items():
        if value:
            _print_fact(label, value, console.width)
    tests = checking_tests(clause_id)
    if not tests:
        _print_fact("tests", "none in this version of the suite", console.width)
    for number, (name, promise) in enumerate(tests.items()):
        _print_fact("tests" if number == 0 else "", promise or "no promise", console.width)
        print(f"{' ' * (LABEL_WIDTH + 2)}{name}")


def checking_tests(clause_id: str) -> dict[str, str]:
    """The tests that are about the clause, each with its promise."""
    found = {}
    for name, test in suite_tests().items():
        if test.metadata.clause == clause_id:
            found[name] = (inspect.getdoc(test.function) or "").partition("\n\n")[0].replace("\n", " ")
    return found


def _print_fact(label: str, value: str, width: int) -> None:
    lines = textwrap.wrap(
        value,
        width,
        initial_indent=f"  {label:<{LABEL_WIDTH}}",
        subsequent_indent=" " * (LABEL_WIDTH + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    print("\n".join(lines))
