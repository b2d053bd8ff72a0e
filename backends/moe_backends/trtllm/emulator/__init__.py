"""FlashInfer's MoE entry points in PyTorch: signatures, return forms, row counts and labels of a chosen version."""

from .entry_points import Emulator

__all__ = ["Emulator"]
