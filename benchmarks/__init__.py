"""Measurements, one folder each: README with the results, and the script that makes them."""
