"""Command lines and the training loop of MegaTile."""
