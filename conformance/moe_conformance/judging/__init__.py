"""How a result is compared with the truth: verdicts of one comparison, controls it has to reject, likely causes."""
