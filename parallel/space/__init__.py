"""Boxes of a tile too large to compute at once: which rows every operation needs, on paper."""
