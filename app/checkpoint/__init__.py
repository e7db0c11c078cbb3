"""Checkpoints: their content, when they are due, and how they are written while training continues."""
