"""Planted faults: small deltas over correct backends, and the kill matrix that shows which test notices each."""
