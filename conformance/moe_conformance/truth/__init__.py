"""What is right: exact values of every stage in float64, and the bounds that rounding may move them by."""
