"""From a user's module to a graph of layers, and from a partition to modules of stages; what cannot be split is
refused."""
