"""Wrong engines: the code between producer and consumer, put in place of the contract's own while a fault runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_conformance.faults.model import Fault, Patch, Planted, family_of, name_of, sentence_of
from moe_contract import Consumer, Producer

FORWARD = "moe_conformance.subjects.layer.MoEForward"
"""The layer's forward pass as the suite calls it."""
NEGOTIATE = "moe_conformance.subjects.pair.negotiate"
"""The question whether a producer may defer towards a consumer."""
COMPLETE = ("moe_conformance.suite.test_defer.complete", "moe_contract.forward.complete")
"""The completion, as any holder and as the layer itself calls it."""


def engine_fault(
    clause: str,
    *targets: str,
    into: list[Fault],
    smallest: str = "",
    bugs: tuple[str, ...] = (),
    producer: Producer | None = None,
    consumer: Consumer | None = None,
) -> Callable[[Any], Any]:
    """Registers what stands in for ``targets``; its name is the fault's id, its docstring the sentence."""

    def register(wrong: Any) -> Any:
        planted = Planted(producer, consumer, tuple(Patch(target, wrong) for target in targets))
        into.append(
            Fault(name_of(wrong), clause, sentence_of(wrong), "engine", family_of(wrong), lambda: planted,
                  smallest, bugs)
        )  # fmt: skip
        return wrong

    return register
