"""Running N ranks: in one process on threads."""
