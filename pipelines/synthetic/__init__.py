"""Artificial slides of stained tissue: every object drawn is a pure function of (seed, lattice cell)."""
