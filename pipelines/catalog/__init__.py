"""The slides of a folder: found, held open, checked, and those that failed."""
