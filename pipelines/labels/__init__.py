"""Labels, splits, annotations and masks of slides."""
