"""Checkpoints: content, interval, and writing while training continues."""
