"""What forward passes keep, and optimizer and parameters: on the device, on the host, or computed again."""
