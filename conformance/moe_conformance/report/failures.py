"""Failures grouped as their reader sees them: one block for each thing that is wrong, not for each case."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from moe_conformance.cases.case import LayerCase, TailCase, kind_of
from moe_conformance.report.model import CaseResult, Selection
from moe_conformance.verdicts import Verdict
from moe_contract import UnknownClauseError, Violation, get_clause


@dataclass
class FailureGroup:
    """Cases that fail in the same way; the simplest one is shown."""

    verdict: Verdict
    clause: str
    """The clause they are blamed on; empty for errors, which are no clause's."""
    subject: str
    """``consumer NAME``, ``producer NAME`` or ``pair P x C``."""
    cases: list[CaseResult]
    explained: list[CaseResult]
    """Failures of other tests that this one accounts for."""

    @property
    def shown(self) -> CaseResult:
        """The simplest case, which stands for all."""
        return min(self.cases, key=lambda case: _complexity(case, self.clause))


def group_failures(cases: Iterable[CaseResult]) -> list[FailureGroup]:
    """Broken cases, grouped by (blamed clause, backends, hint); the most frequent first within a verdict."""
    groups: dict[tuple[str, ...], FailureGroup] = {}
    explained = []
    for case in cases:
        if case.explained_by:
            explained.append(case)
        elif case.broken:
            clause = case.blamed if case.verdict is Verdict.FAIL else ""
            key = (case.verdict.value, clause, subject(case), _same_cause(case))
            groups.setdefault(key, FailureGroup(case.verdict, clause, subject(case), [], [])).cases.append(case)
    _merge_pairs(groups)
    for case in explained:
        _attach(case, groups)
    order = [Verdict.FAIL, Verdict.OVER_CLAIMED, Verdict.ERROR, Verdict.VACUOUS]
    return sorted(groups.values(), key=lambda group: (order.index(group.verdict), -len(group.cases)))


def subject(case: CaseResult) -> str:
    """Side and name of what the case ran."""
    if case.producer and case.consumer:
        return f"pair {case.pair}"
    return f"producer {case.producer}" if case.producer else f"consumer {case.consumer}"


def block(group: FailureGroup, selection: Selection, *, with_text: bool = True) -> Iterator[tuple[str, str]]:
    """The lines of one group as (style, text), the header first; ``with_text``: what the clause says, too."""
    case = group.shown
    clause = f"  {group.clause}" if group.clause else ""
    yield "header", f"{group.verdict.value.upper()}{clause}  {group.subject}  {describe_case(case)}{place(case)}"
    if group.clause and with_text:
        yield "text", clause_text(group.clause)
    if case.violations:
        first = case.violations[0]
        bound = f"  bound {first.bound:.3g}" if first.bound is not None else ""
        yield "values", f"{first.field}: got {first.got}  expected {first.expected}{bound}"
        if first.hint:
            yield "hint", first.hint
    else:
        yield "values", case.reason
    yield from (("count", text) for text in _counts(group))
    if group.clause:
        yield "command", f"more: moe-conformance explain {group.clause}"
    differs = group.clause and case.clause != group.clause
    found = f" (found by the test of {case.clause})" if differs else ""
    yield "command", f"reproduce{found}: {reproduce(case, selection)}"


def describe_case(case: CaseResult) -> str:
    """``T=17 K=8 H=2048 tp=2 bf16`` and the features that are not at their defaults."""
    return " ".join([sizes(case), *(parameters_of(case).features if case.case else ())])


def sizes(case: CaseResult) -> str:
    """``T=17 K=8 H=2048 tp=2 bf16``; the id of what ended before it had parameters."""
    if not case.case:
        return case.case_id
    shape = parameters_of(case)
    return f"T={shape.tokens} K={shape.top_k} H={shape.hidden_size} tp={shape.ranks} {shape.short_dtype}"


def parameters_of(case: CaseResult) -> LayerCase | TailCase:
    """The parameters that the result carries, as the case that they make."""
    return kind_of(case.case).model_validate(case.case)


def place(case: CaseResult) -> str:
    """Rank, token, slot and column of the first violation."""
    if not case.violations:
        return ""
    first = case.violations[0]
    places = {"rank": first.rank, "token": first.token, "slot": first.slot, "column": first.column}
    known = ", ".join(f"{name} {at}" for name, at in places.items() if at is not None)
    return f"   {known}" if known else ""


def clause_text(clause_id: str) -> str:
    """What the clause says."""
    try:
        return get_clause(clause_id).text
    except UnknownClauseError:
        return f"{clause_id} is not in the clause registry"


def reproduce(case: CaseResult, selection: Selection) -> str:
    """The command that runs this case again, with as little else as the options allow."""
    parts = ["moe-conformance", "run"]
    for option, name in (("--producer", case.producer), ("--consumer", case.consumer)):
        parts += [option, name] if name else []
    parts += ["--clause", case.clause]
    if case.explained_by and case.explained_by != case.clause:
        parts += ["--clause", case.explained_by]  # what it is blamed on shows only beside the clause's own failure
    parts += ["--profile", selection.profile]
    if selection.ranks_given:
        parts += ["--tp", ",".join(map(str, selection.ranks))]
    if selection.device != "cpu":
        parts += ["--device", selection.device]
    if selection.seed:
        parts += ["--seed", str(selection.seed)]
    if selection.timeout_s is not None:
        parts += ["--timeout", f"{selection.timeout_s:g}"]
    return shlex.join(parts)


def _complexity(case: CaseResult, clause: str) -> tuple[object, ...]:
    """Orders cases from the one that is easiest to look into: one backend before two, no variant before many, then the
    sizes; of equal ones the test of the blamed clause itself comes first."""
    backends = sum(name is not None for name in (case.producer, case.consumer))
    numbers = [case.case.get(name, 0) for name in ("tokens", "ranks", "top_k", "hidden_size")]
    return (backends, _variants(case), *numbers, case.clause != clause, case.id)


def _variants(case: CaseResult) -> int:
    """How many features of the case are not at their defaults."""
    fields = kind_of(case.case).model_fields
    optional = {name: field.default for name, field in fields.items() if not field.is_required()}
    return sum(case.case.get(name, default) != default for name, default in optional.items())


def _same_cause(case: CaseResult) -> str:
    """What two cases share when the same thing is wrong: the hint, or the reason, without its numbers."""
    text = _cause_of(case.violations[0]) if case.violations else case.reason
    for name in (case.producer, case.consumer):
        text = text.replace(name, "") if name else text
    text = re.sub(r" of rank \d+| \([^()]*\d[^()]*\)| x ", " ", text)
    text = re.sub(r"\s+", " ", text.partition(";")[0]).strip()  # after it comes what is particular to a case
    return re.sub(r"-?\d+(\.\d+)?(e[-+]?\d+)?", "#", text)


def _cause_of(violation: Violation) -> str:
    return violation.hint or violation.field


def _merge_pairs(groups: dict[tuple[str, ...], FailureGroup]) -> None:
    """Puts what a pair does wrong with the same fault of its consumer or producer alone."""
    for key, group in list(groups.items()):
        case = group.shown
        if not (case.producer and case.consumer):
            continue
        verdict, clause, _, cause = key
        for alone in (f"consumer {case.consumer}", f"producer {case.producer}"):
            single = groups.get((verdict, clause, alone, cause))
            if single is not None:
                single.cases += group.cases
                del groups[key]
                break


def _attach(case: CaseResult, groups: dict[tuple[str, ...], FailureGroup]) -> None:
    backends = {case.producer, case.consumer} - {None}
    for group in groups.values():
        if group.clause == case.explained_by and backends & {group.shown.producer, group.shown.consumer}:
            group.explained.append(case)
            return
    key = (case.verdict.value, case.blamed, subject(case), "explained")
    groups[key] = FailureGroup(case.verdict, case.blamed, subject(case), [case], [])


def _counts(group: FailureGroup) -> Iterator[str]:
    if len(group.cases) > 1:
        by_clause = Counter(case.clause for case in group.cases)
        tests = ", ".join(f"{clause} {count}" for clause, count in by_clause.most_common())
        yield f"{len(group.cases)} cases end like this{_partners(group)}; by tested clause: {tests}"
    if group.explained:
        by_clause = Counter(case.clause for case in group.explained)
        tests = ", ".join(f"{clause} {count}" for clause, count in by_clause.most_common())
        yield f"accounts for {len(group.explained)} failures of composite tests too: {tests}"


def _partners(group: FailureGroup) -> str:
    """With which partners a backend that fails alone fails as well."""
    if group.subject.startswith("pair"):
        return ""
    shown = {group.shown.producer, group.shown.consumer}
    pairs = [case for case in group.cases if case.producer and case.consumer]
    partners = sorted({name for case in pairs for name in (case.producer, case.consumer) if name and name not in shown})
    return f", {len(pairs)} of them in pairs with {', '.join(partners)}" if pairs else ""
