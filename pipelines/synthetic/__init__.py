"""Synthetic slides of stained tissue: every object drawn is a function of (seed, place)."""
