"""Slide readers, one file format family per module. Only these modules import slide libraries."""
