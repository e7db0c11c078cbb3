"""Predictions compared with the truth: slides, patients, pixels, lesions."""
