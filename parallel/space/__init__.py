"""Boxes of a tile too large to compute as a whole: which rows every operation needs, on paper."""
