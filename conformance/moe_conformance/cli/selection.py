"""From option texts to a plan's request: names that load, a device that exists, clauses and profiles that are known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moe_conformance.cases.profiles import ProfileError, get_profile
from moe_conformance.cli.errors import CommandError, one_line
from moe_conformance.plan import PlanRequest
from moe_conformance.report.model import BackendRecord
from moe_contract import (
    Consumer,
    ConsumerDeclaration,
    Gated,
    Producer,
    ProducerDeclaration,
    UnknownClauseError,
    get_clause,
)
from moe_contract.discovery import (
    BackendNotFoundError,
    Side,
    installed_backends,
    load_backend,
    load_consumer,
    load_producer,
)

REFERENCE = "reference"
"""The partner of a backend that is named alone."""
MOST_RANKS = 64
"""Largest tensor-parallel size: ranks are threads of one process, and the published kernels end at 64."""
LARGEST_SEED = 2**32 - 1
"""The inputs' streams are told apart by multiples of about 2^20 of it, which stay within torch's 64 bits."""
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class SelectionOptions:
    """The options that select cases, as the user wrote them."""

    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    profile: str
    sizes: str | None
    device: str | None
    clauses: tuple[str, ...]
    seed: int


@dataclass(frozen=True)
class Candidate:
    """One side of one backend, and why it cannot run here; empty when it can."""

    name: str
    side: Side
    declaration: ProducerDeclaration | ConsumerDeclaration | None
    not_run_reason: str = ""

    def record(self) -> BackendRecord:
        """What the report says of it."""
        declared = self.declaration
        profile = declared.profile.value if isinstance(declared, ConsumerDeclaration) else None
        return BackendRecord(
            name=self.name,
            side=self.side,
            version=declared.version if declared else "",
            emulated=declared.emulated if declared else False,
            rounding_profile=profile,
            not_run_reason=self.not_run_reason,
        )


@dataclass(frozen=True)
class Selected:
    """What runs, and what the report says of each backend that was considered."""

    request: PlanRequest
    backends: tuple[BackendRecord, ...]


def select(asked: SelectionOptions) -> Selected:
    """Checks everything that was asked for; raises CommandError."""
    check_profile(asked.profile)
    clauses = [check_clause(clause) for clause in asked.clauses]
    check_seed(asked.seed)
    device = choose_device(asked.device)
    ranks = parse_sizes(asked.sizes)
    candidates, partners = _candidates(asked, device)
    usable = [candidate for candidate in candidates if not candidate.not_run_reason]
    request = PlanRequest(
        producers=tuple(c.name for c in usable if c.side == "producer"),
        consumers=tuple(c.name for c in usable if c.side == "consumer"),
        profile=asked.profile,
        ranks=ranks,
        device=device,
        clauses=tuple(dict.fromkeys(clauses)),
        seed=asked.seed,
        partners=partners,
    )
    return Selected(request, tuple(candidate.record() for candidate in candidates))


def check_profile(name: str) -> None:
    """Raises CommandError for a profile or model that does not exist."""
    try:
        get_profile(name)
    except ProfileError as error:
        raise CommandError(str(error)) from error


def check_clause(text: str) -> str:
    """The id of a clause that was written in any case; raises CommandError for one that does not exist."""
    try:
        return get_clause(text.upper()).id
    except UnknownClauseError as error:
        raise CommandError(str(error.args[0])) from error


def check_seed(seed: int) -> None:
    """Raises CommandError for a seed that torch's generators would not take in every stream made from it."""
    if not 0 <= seed <= LARGEST_SEED:
        raise CommandError(f"--seed: expected a whole number from 0 to {LARGEST_SEED}, got {seed}")


def parse_sizes(text: str | None) -> tuple[int, ...] | None:
    """``1,2,4`` as numbers; raises CommandError."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= MOST_RANKS for part in parts):
        raise CommandError(f"--tp: expected sizes from 1 to {MOST_RANKS} such as 1,2,4, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def choose_device(name: str | None) -> Device:
    """The device asked for, or the GPU where there is one; raises CommandError."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return "cpu"
    if name != "cuda":
        raise CommandError(f"--device: expected cpu or cuda, got {name!r}")
    if not torch.cuda.is_available():
        raise CommandError("--device cuda: torch sees no GPU here; moe-conformance doctor says what it sees")
    return "cuda"


def installed_candidates(device: Device) -> list[Candidate]:
    """Both sides of every installed backend, the ones that cannot run with the reason."""
    found: list[Candidate] = []
    for name in installed_backends():
        try:
            backend = load_backend(name)
        except BackendNotFoundError as error:
            found.append(Candidate(name, "producer", None, one_line(error)))
            continue
        if backend.producer is not None:
            found.append(_candidate(name, "producer", backend.producer, device))
        if backend.consumer is not None:
            found.append(_candidate(name, "consumer", backend.consumer, device))
    return found


def _candidates(asked: SelectionOptions, device: Device) -> tuple[list[Candidate], tuple[str, ...]]:
    """The backends that take part, and which of them only as partners."""
    if not asked.producers and not asked.consumers:
        return [_in_profile(candidate, asked.profile) for candidate in installed_candidates(device)], ()
    producers = [_named(name, "producer", device) for name in dict.fromkeys(asked.producers)]
    consumers = [_named(name, "consumer", device) for name in dict.fromkeys(asked.consumers)]
    if not consumers:
        return [*producers, _named(REFERENCE, "consumer", device)], (f"consumer:{REFERENCE}",)
    if not producers:
        return [_named(REFERENCE, "producer", device), *consumers], (f"producer:{REFERENCE}",)
    return [*producers, *consumers], ()


def _in_profile(candidate: Candidate, profile: str) -> Candidate:
    """The candidate, left out where it is an emulation and the profile takes none that is not named."""
    emulated = candidate.declaration is not None and candidate.declaration.emulated
    if candidate.not_run_reason or not emulated or get_profile(profile).emulations:
        return candidate
    option = f"--{candidate.side} {candidate.name}"
    return replace(candidate, not_run_reason=f"profile {profile} leaves out emulations; {option} runs it")


def _named(name: str, side: Side, device: Device) -> Candidate:
    """A backend that the user named; raises CommandError where it cannot be loaded."""
    try:
        loaded = load_producer(name) if side == "producer" else load_consumer(name)
        return _candidate(name, side, loaded, device)
    except BackendNotFoundError as error:
        raise CommandError(str(error)) from error


def _candidate(name: str, side: Side, backend: Producer | Consumer, device: Device) -> Candidate:
    declared = backend.declaration
    if device in declared.devices:
        missing = backend.unavailable(device) if isinstance(backend, Gated) else ""
        return Candidate(name, side, declared, one_line(missing))
    needs = f"; it needs {declared.requires}" if declared.requires else ""
    return Candidate(
        name,
        side,
        declared,
        f"declares no support for device {device} (declared: {', '.join(sorted(declared.devices))}){needs}",
    )
