"""A user's module becomes a graph of layers, and by a partition modules of stages; what cannot be split is refused."""
