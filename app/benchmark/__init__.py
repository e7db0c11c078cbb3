"""Runs side by side on the same work: cases, trials, rows."""
