"""The result of a run: one model, and the views of it."""
