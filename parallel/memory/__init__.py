"""Bytes: of layers, stages and ranks, whatever is saved, offloaded or recomputed."""
