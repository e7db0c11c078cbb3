"""Comparison of predictions with the truth: slides, patients, pixels, lesions."""
