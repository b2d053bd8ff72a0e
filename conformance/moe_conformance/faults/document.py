"""docs/faults.md, generated: ``python -m moe_conformance.faults.document faults.json docs/faults.md``.

The JSON is what ``moe-conformance faults --json`` writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_conformance.faults.known_bugs import KNOWN_BUGS
from moe_conformance.faults.results import FaultResult, MatrixReport, RuleResult
from moe_conformance.faults.rules import RULES
from moe_conformance.faults.tests_without_fault import JUSTIFIED
from moe_contract.clauses import registry

HEADER = """# Planted faults

<!-- Generated from the JSON of a run; change faults/document.py, not this file:
moe-conformance faults --json faults.json && python -m moe_conformance.faults.document faults.json docs/faults.md -->

A suite is worth what it would catch. `moe-conformance faults` runs this one on backends that are wrong in one way
each, and on unusual ones that are right. A fault is *killed* when the report of its run begins with the clause that
it breaks, *killed by other* when it begins with another clause, and has *survived* when nothing failed in the smoke
profile, nor in core after it. The command ends with exit status 0 only where every fault that can run is killed and
nothing right is blamed.

```
moe-conformance faults                        all faults and all correct variants
moe-conformance faults --clause MAP-4         those of one clause
moe-conformance faults --fault last-row-read  one
moe-conformance faults --json faults.json     the whole as JSON
moe-conformance list faults                   every fault with its sentence
```
"""
HOW_TO = '''## From a bug report to a fault

Faults are files of one family each in `moe_conformance/faults/families`; a file that is put there is found. A wrong
consumer is the correct `PlainTail` with one of its steps replaced, a wrong producer a function of the correct one's
output, call, layer or config, and a wrong engine takes the place of one of the contract's own functions. The name
becomes the id, the docstring the sentence, `bugs` names public reports that are in `known_bugs.py`:

```python
@consumer_fault("MAP-4", bugs=("vllm#46408",), smallest="one slot of -1")
class LastRowRead(PlainTail):
    """-1 indexes the last row, as Python does."""

    def terms(self, routed: UnfinalizedMoEOutput) -> Tensor:
        """Every slot is taken."""
        index = routed.expanded_idx_to_permuted_idx.long()
        return routed.gemm2_permuted[index].float() * self.weights(routed).unsqueeze(-1)


@producer_fault("WGT-1", smallest="K=2")
def weights_in_reverse_slot_order(output: UnfinalizedMoEOutput, call: Call) -> UnfinalizedMoEOutput:
    """Each token's weights stand in the reverse of the map's order."""
    return replace(output, expert_weights=output.expert_weights.flip(1))
```

Then `moe-conformance faults --fault last-row-read`. Where it survives, or another clause is blamed: first make sure
that the backend breaks its clause and nothing else. If it does, the suite is at fault; mend the kind of gap, never
this one case, and never a bound.
'''


def document(report: MatrixReport) -> str:
    """The page."""
    parts = [HEADER, _summary(report), HOW_TO, *_matrix(report), *_variants(report), *_rules(report), *_bugs(report)]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _summary(report: MatrixReport) -> str:
    cases = sum(variant.cases for variant in report.variants)
    closest = max((variant.headroom for variant in report.variants if variant.headroom is not None), default=0.0)
    idle = "".join(
        f"\n- `{test}`: {JUSTIFIED.get(test, 'no reason is known')}" for test in report.idle_tests
    )  # fmt: skip
    return (
        f"## This run\n\n{len(report.faults)} faults: {report.count('killed')} killed, "
        f"{report.count('killed-by-other')} killed by other, {report.count('survived')} survived, "
        f"{report.count('not-runnable')} not runnable on its machine. {len(report.variants)} correct variants, "
        f"{cases} cases, {report.false_alarms} false alarms; largest error/bound {closest:.4f}. "
        f"{report.seconds:.0f} s.\n\nTests that no fault made fail:{idle or ' none.'}\n"
    )


def _matrix(report: MatrixReport) -> Iterator[str]:
    yield "## The matrix\n\nBy clause; the last column counts failing cases by the clause that they are blamed on.\n"
    for clause in registry():
        found = [fault for fault in report.faults if fault.clause == clause]
        if found:
            rows = [f"| `{f.id}` | {f.side} | {_cell(f.what)} | {f.verdict} | {_blamed(f)} |" for f in found]
            yield "\n".join([f"### {clause}\n", *_head("fault", "side", "what is wrong", "verdict", "blamed"), *rows])


def _blamed(fault: FaultResult) -> str:
    return ", ".join(f"{clause} {count}" for clause, count in fault.blamed.items()) or fault.reason


def _variants(report: MatrixReport) -> Iterator[str]:
    rows = [
        f"| `{v.id}` | {_cell(v.what)} | {v.profile} | {v.cases} | {len(v.false_alarms)} | "
        f"{'' if v.headroom is None else f'{v.headroom:.4f}'} |"
        for v in report.variants
    ]
    head = _head("variant", "what", "profile", "cases", "false alarms", "largest error/bound")
    yield "\n".join(["## Correct variants\n", *head, *rows])


def _rules(report: MatrixReport) -> Iterator[str]:
    compared = [fault for fault in report.faults if fault.rules]
    judged = [variant for variant in report.variants if variant.rules]

    def counts(results: Sequence[RuleResult]) -> str:
        return f"{sum(bool(r.normal) for r in results)} | {sum(bool(r.small) for r in results)}"

    rows = [
        f"| {rule} | {counts([f.rules[rule] for f in compared])} | {counts([v.rules[rule] for v in judged])} |"
        for rule in RULES
    ]
    killed, wrong = sum(f.verdict == "killed" for f in compared), sum(bool(v.false_alarms) for v in judged)
    rows.append(f"| this suite | {killed} | {killed} | {wrong} | {wrong} |")
    head = _head(
        "acceptance rule", "noticed at N(0, 1)", "at N(0, 0.02²)", "right rejected at N(0, 1)", "at N(0, 0.02²)"
    )  # fmt: skip
    yield "\n".join([
        "## Acceptance rules in public use\n",
        f"The same {len(compared)} faults and {len(judged)} correct variants under rules that kernels' own tests have. "
        "Each compares one result of one ordinary batch, residual and norm, with that of the correct backend: a rule "
        "that is given no case that shows a fault cannot notice it, which is what a suite adds to a rule.\n",
        *head, *rows,
    ])  # fmt: skip


def _bugs(report: MatrixReport) -> Iterator[str]:
    rows = []
    for bug, further in KNOWN_BUGS.items():
        names = ", ".join(f"`{fault.id}`" for fault in report.faults if bug in fault.bugs)
        rows.append(f"| {', '.join((bug, *further))} | {names} |")
    yield "\n".join(["## Public reports\n", *_head("reports of one defect", "faults"), *rows])


def _head(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:3])
    found = MatrixReport.model_validate_json(source.read_text(encoding="utf-8"))
    target.write_text(document(found), encoding="utf-8")
