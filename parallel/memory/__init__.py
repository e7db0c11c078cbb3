"""Bytes of layers, stages and ranks, with tensors saved, offloaded or recomputed."""
