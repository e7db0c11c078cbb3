"""Boxes of a tile, one after the other or on several ranks, from shapes alone: rows of operations, bytes, cuts."""
