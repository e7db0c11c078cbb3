"""Computation of a tile box by box, recomputed in the backward pass, with the results of the whole tile."""
