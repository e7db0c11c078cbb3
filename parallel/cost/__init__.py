"""Seconds: of layers from data sheets and calibrations, of stages, of links."""
