"""Backends of the MoE output contract; one folder each, found by entry point."""
