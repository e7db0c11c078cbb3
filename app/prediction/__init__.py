"""Prediction of whole slides: windows, blending, heat maps, polygons."""
