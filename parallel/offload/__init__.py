"""Saved tensors, optimizer state and parameters: on the device, offloaded to the host, or recomputed."""
