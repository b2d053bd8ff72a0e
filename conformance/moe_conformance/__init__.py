"""The suite that decides whether a MoE kernel keeps the output contract."""
