"""``moe-conformance list``: plain lines, one thing each, for eyes and for grep."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Collection

from moe_conformance.cases.models import models
from moe_conformance.cases.profiles import MODEL_PREFIX, PROFILE_NAMES, get_profile
from moe_conformance.cli.errors import CommandError, unknown
from moe_conformance.cli.missing_cases import absence_notes
from moe_conformance.cli.selection import SelectionOptions, choose_device, installed_candidates, select
from moe_conformance.plan import PlanError, plan
from moe_conformance.report.terminal import make_console
from moe_contract.clauses import registry

OPTIONS: dict[str, Collection[str]] = {"backends": ("--device",)}
"""The options that say something to a list, but for ``cases``, which takes all."""


def list_command(what: str, asked: SelectionOptions, given: Collection[str] = ()) -> None:
    """Prints what was asked for; raises CommandError for an unknown list and for an option that it does not take.

    ``given``: the options that stand on the command line.
    """
    lists: dict[str, Callable[[SelectionOptions], None]] = {
        "backends": _backends,
        "clauses": _clauses,
        "cases": _cases,
        "profiles": _profiles,
        "models": _models,
        "faults": _faults,
    }
    if what not in lists:
        raise unknown("list", what, lists)
    for option in sorted(given) if what != "cases" else ():
        if option not in OPTIONS.get(what, ()):
            raise CommandError(f"list {what} takes no {option}: {_instead(option, asked)}")
    lists[what](asked)


def _instead(option: str, asked: SelectionOptions) -> str:
    """What to do in place of an option that a list does not take."""
    if option == "--clause":
        return f"moe-conformance explain {asked.clauses[0]} says what the clause asks for"
    return "leave it out, or ask for list cases, which are what it selects"


def _backends(asked: SelectionOptions) -> None:
    candidates = installed_candidates(choose_device(asked.device))
    width = max((len(candidate.name) for candidate in candidates), default=0)
    for candidate in candidates:
        declared = candidate.declaration
        version = declared.version if declared else "-"
        state = f"cannot run here: {candidate.not_run_reason}" if candidate.not_run_reason else "can run here"
        _print_entry(f"{candidate.name:<{width}}  {candidate.side:<8}  {version:<8}  ", state)


def _faults(asked: SelectionOptions) -> None:
    from moe_conformance.faults.catalogue import faults

    width = max(map(len, faults()))
    for fault in faults().values():
        _print_entry(f"{fault.id:<{width}}  {fault.clause:<8}  {fault.side:<8}  ", fault.what)


def _clauses(asked: SelectionOptions) -> None:
    for clause in registry().values():
        level = "" if clause.level == "MUST" else f"({clause.level}) "
        _print_entry(f"{clause.id:<9} {clause.side:<9} ", f"{level}{clause.text}")


def _cases(asked: SelectionOptions) -> None:
    request = select(asked).request
    try:
        planned = plan(request)
    except PlanError as error:
        raise CommandError(str(error)) from error
    for note in absence_notes(asked, request, planned):
        print(note, file=sys.stderr)
    for case in planned:
        print(f"{case.clause:<9} {case.id}")


def _profiles(asked: SelectionOptions) -> None:
    for name in PROFILE_NAMES:
        sizes = ",".join(map(str, get_profile(name).default_ranks))
        print(f"{name:<8} tensor-parallel sizes {sizes}")
    _print_entry(f"{MODEL_PREFIX}NAME ", "the layer of one model, see moe-conformance list models")


def _models(asked: SelectionOptions) -> None:
    width = max(len(name) for name in models())
    for name, model in models().items():
        sizes = ",".join(map(str, model.tp))
        print(
            f"{name:<{width}}  H {model.hidden_size:<5}  experts {model.num_experts:<4} top_k {model.top_k:<3} "
            f"tp {sizes}"
        )


def _print_entry(head: str, text: str) -> None:
    """A line that is folded under its own text on a narrow terminal."""
    width = make_console().width
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    print("\n".join(lines) or head.rstrip())
