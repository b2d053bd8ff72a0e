"""Random streams: the same seed, purpose and rank give the same bits on every machine, and no two share a stream."""

from __future__ import annotations

from enum import IntEnum

import torch

SEED_STEP = 1_000_003
"""Distance of two seeds' streams: a prime above every rank's offset up to 126 ranks, so that rank r of seed s is not
rank 0 of another seed."""
RANK_STEP = 7_919
"""Distance of two ranks' streams of one seed: a prime above every purpose."""


class Purpose(IntEnum):
    """What a stream is drawn for; its offset."""

    TAIL = 17
    """Inputs of a tail: one stream a rank, and one more for what ranks share."""
    LAYER_INPUTS = 29
    """A layer's tokens, logits and routing."""
    LAYER_WEIGHTS = 31
    """Its experts, which cases with other tokens share."""


def stream(seed: int, purpose: Purpose, rank: int = 0) -> torch.Generator:
    """The generator at the start of its stream."""
    return torch.Generator().manual_seed(seed * SEED_STEP + rank * RANK_STEP + purpose)
