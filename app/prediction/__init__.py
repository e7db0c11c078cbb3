"""Whole slides predicted: windows, blending, heat maps, polygons."""
