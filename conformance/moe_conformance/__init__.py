"""The suite that decides whether a MoE kernel keeps the output contract."""

import warnings

# torch says so at import where numpy is not installed; nothing here uses numpy, and a user can do nothing about it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
