"""Which way to train: candidates, cuts, search, limits, and the plan as JSON."""
