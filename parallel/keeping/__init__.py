"""What a forward pass keeps for its backward pass: held on the device, moved to the host, or computed again."""
