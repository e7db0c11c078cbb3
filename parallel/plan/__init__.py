"""Search for the fastest strategy that fits: candidates, cuts, limits, and the plan as JSON."""
