"""What is known of slides: labels, splits, annotations and their masks."""
