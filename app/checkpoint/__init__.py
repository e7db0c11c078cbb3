"""Checkpoints: what is in them, when they are due, and how they reach the disk beside training."""
