"""Tracing of a module to a graph of layers, and by a partition to modules of stages; refusal of the rest."""
