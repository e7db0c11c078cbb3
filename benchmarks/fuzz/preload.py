"""Modules of the process that variants are forked from: all readers, no torch."""

from __future__ import annotations

from benchmarks.fuzz import run
from pipelines.backends import image, openslide, tiled, zarr

__all__ = ["image", "openslide", "run", "tiled", "zarr"]
