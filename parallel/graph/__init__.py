"""A model as layers: blocks, cuts and partitions. Plain data."""
