"""A report as JUnit XML, for CI servers."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from moe_conformance.report.model import CaseResult, Report
from moe_conformance.verdicts import Verdict

ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Everything outside XML 1.0's Char: one such character, from a backend's message, makes a document unreadable."""
TAGS = {
    Verdict.FAIL: "failure",
    Verdict.OVER_CLAIMED: "failure",
    Verdict.ERROR: "error",
    Verdict.VACUOUS: "error",
    Verdict.UNSUPPORTED: "skipped",
    Verdict.NOT_RUN: "skipped",
    Verdict.QUARANTINED: "skipped",
}
"""JUnit's word for a verdict; none for those that count as passed."""


def junit_xml(report: Report) -> bytes:
    """The document."""
    root = ElementTree.Element("testsuites", name="moe-conformance")
    suite = ElementTree.SubElement(root, "testsuite", name=f"moe-conformance {report.selection.profile}")
    tags = [TAGS.get(case.verdict) for case in report.cases]
    suite.set("tests", str(len(report.cases) + len(report.suite_errors)))
    suite.set("failures", str(tags.count("failure")))
    suite.set("errors", str(tags.count("error") + len(report.suite_errors)))
    suite.set("skipped", str(tags.count("skipped")))
    suite.set("time", f"{report.duration_s:.3f}")
    suite.set("timestamp", report.started)
    _properties(suite, _run_properties(report))
    for case in report.cases:
        _add_case(suite, case)
    for number, text in enumerate(report.suite_errors):
        element = ElementTree.SubElement(suite, "testcase", classname="suite", name=f"suite error {number + 1}")
        ElementTree.SubElement(element, "error", message=_legal(text))
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _add_case(suite: ElementTree.Element, case: CaseResult) -> None:
    classname, _, parameter = case.id.partition("[")
    element = ElementTree.SubElement(suite, "testcase", classname=_legal(classname.replace(".py::", ".")))
    element.set("name", _legal(parameter.removesuffix("]") or classname))
    element.set("time", f"{case.duration_s:.3f}")
    headroom = "" if case.headroom is None else f"{case.headroom:.4g}"
    facts = {
        "clause": case.clause,
        "blamed": case.blamed if case.broken else "",
        "verdict": case.verdict.value,
        "producer": case.producer or "",
        "consumer": case.consumer or "",
        "headroom": headroom,
    }
    _properties(element, facts)
    tag = TAGS.get(case.verdict)
    if tag:
        outcome = ElementTree.SubElement(element, tag, message=_legal(case.reason), type=case.verdict.value)
        text = "\n".join(str(violation) for violation in case.violations)
        if case.explained_by:
            text += f"\nexplained by {case.explained_by}, which this backend breaks by itself"
        outcome.text = _legal(text) or None


def _run_properties(report: Report) -> dict[str, str]:
    where = {name: "" if value is None else str(value) for name, value in report.environment.model_dump().items()}
    return where | {"complete": str(report.complete).lower(), "command": report.command}


def _properties(parent: ElementTree.Element, facts: dict[str, str]) -> None:
    properties = ElementTree.SubElement(parent, "properties")
    for name, value in facts.items():
        if value:
            ElementTree.SubElement(properties, "property", name=name, value=_legal(value))


def _legal(text: str) -> str:
    return ILLEGAL.sub("?", text)
