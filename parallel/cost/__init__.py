"""Seconds of layers, stages and links, from data sheets and calibrations."""
