"""Layers of a model as plain data: blocks, cuts and partitions."""
