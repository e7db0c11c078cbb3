"""Tiles on their way to the device: order, reading, targets, augmentation, batches, prefetching."""
