"""A tile computed box by box, and once more in the backward pass, exactly as if it were computed whole."""
