"""Predictions held against the truth: slides, patients, px, lesions."""
