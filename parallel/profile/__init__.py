"""Times of operations, layers and copies, measured on this device."""
