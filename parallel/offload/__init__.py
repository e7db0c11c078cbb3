"""Saved tensors, optimizer state and parameters: on the device, on the host, or recomputed."""
