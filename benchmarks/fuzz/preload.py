"""Modules of the process that variants are forked from: all readers, no torch."""

from __future__ import annotations

import importlib

from benchmarks.fuzz import run
from pipelines.backends.registry import BACKENDS

__all__ = ["run"]

for name in BACKENDS:
    importlib.import_module(f"pipelines.backends.{name}")
