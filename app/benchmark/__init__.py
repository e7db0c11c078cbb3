"""Comparison of runs on the same work: cases, trials, rows."""
