"""Boxes of a tile and parts of it on several ranks, from shapes alone: rows that every operation needs, bytes, cuts."""
