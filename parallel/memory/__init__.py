"""Bytes: of layers, stages and ranks, whatever is kept, moved to the host or computed again."""
