"""A refusal says why, and by which clause where it knows."""

from __future__ import annotations

import pickle

from moe_contract import UnsupportedError


def test_clause_is_told_beside_the_reason() -> None:
    """The reason alone is the message; a refusal without a clause has None."""
    known, unknown = UnsupportedError("no GPU", clause="CAP-2"), UnsupportedError("no compiler")
    assert (str(known), known.clause) == ("no GPU", "CAP-2")
    assert (str(unknown), unknown.clause) == ("no compiler", None)


def test_clause_survives_the_way_to_another_process() -> None:
    """A rank's refusal is pickled on its way to who reports it."""
    copied = pickle.loads(pickle.dumps(UnsupportedError("no GPU", clause="CAP-2")))
    assert (str(copied), copied.clause) == ("no GPU", "CAP-2")
