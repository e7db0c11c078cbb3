"""Slides as files, and batches of their tiles. No model and no communication library is imported here."""
