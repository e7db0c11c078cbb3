"""Slides: regions, levels, coordinates, pixels at any resolution."""
