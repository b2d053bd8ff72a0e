"""The catalogue: one family of faults a file. A file that is put here is found."""
