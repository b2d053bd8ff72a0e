"""The JUnit view."""

from __future__ import annotations

from xml.etree import ElementTree

from moe_conformance.report.junit import junit_xml
from moe_conformance.verdicts import Verdict

from .report_factory import failure, report_of, result


def test_junit_counts_and_marks_every_verdict() -> None:
    """Failures, errors and skips add up to what is not passed."""
    cases = [result(verdict=verdict, number=n, reason="why") for n, verdict in enumerate(Verdict)]
    suite = ElementTree.fromstring(junit_xml(report_of(*cases, suite_errors=("broken",)))).find("testsuite")
    assert suite is not None
    counts = {name: int(suite.get(name, "-1")) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": len(Verdict) + 1, "failures": 2, "errors": 3, "skipped": 3}
    skipped = [element.get("message") for element in suite.iter("skipped")]
    assert skipped == ["why"] * 3


def test_junit_survives_characters_that_xml_has_not() -> None:
    """A control character in a backend's message does not make the document unreadable."""
    dirty = result(verdict=Verdict.ERROR, reason="raised \x00\x1b[31m\ud800 <&> é")
    (error,) = ElementTree.fromstring(junit_xml(report_of(dirty))).iter("error")
    assert error.get("message") == "raised ??[31m? <&> é"


def test_junit_carries_clause_and_blamed_clause() -> None:
    """As properties, since JUnit has no field for them."""
    (element,) = ElementTree.fromstring(junit_xml(report_of(failure("NUM-1")))).iter("testcase")
    facts = {item.get("name"): item.get("value") for item in element.iter("property")}
    assert (facts["clause"], facts["blamed"], facts["verdict"]) == ("NUM-1", "MAP-4", "fail")
    assert element.get("classname") == "test_num_1.test_promise"
