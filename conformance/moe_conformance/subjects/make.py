"""From a planned parameter to what its test is handed."""

from __future__ import annotations

from dataclasses import dataclass

from moe_conformance.plan import Parameter
from moe_conformance.subjects.calls import Settings
from moe_conformance.subjects.layer import LayerSubject
from moe_conformance.subjects.pair import PairSubject
from moe_conformance.subjects.signature_checks import CheckedConsumer, CheckedProducer
from moe_conformance.subjects.tail import TailSubject
from moe_contract import Consumer, Producer

Subject = TailSubject | LayerSubject | PairSubject


@dataclass(frozen=True)
class Sides:
    """The loaded backends of one parameter; one of them may be None."""

    producer: Producer | None
    consumer: Consumer | None


def make_subject(parameter: Parameter, sides: Sides, clause: str, settings: Settings) -> Subject:
    """A consumer, a producer or a pair with the parameter's case."""
    consumer_name, producer_name = parameter.consumer or "", parameter.producer or ""
    consumer = CheckedConsumer(consumer_name, sides.consumer) if sides.consumer is not None else None
    if sides.producer is None:
        assert consumer is not None
        return TailSubject(consumer_name, consumer, parameter.case, clause, settings)
    producer = CheckedProducer(producer_name, sides.producer)
    layer = LayerSubject(producer_name, producer, parameter.case, clause, settings)
    if consumer is None:
        return layer
    return PairSubject(layer, consumer_name, consumer, parameter.case, clause, settings)
