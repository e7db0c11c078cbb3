"""Stream of tiles to the device: order, reading, targets, augmentation, batches, prefetching."""
