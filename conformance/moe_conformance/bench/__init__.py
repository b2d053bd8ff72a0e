"""Timing consumers side by side on a GPU, each result checked in the same run."""
