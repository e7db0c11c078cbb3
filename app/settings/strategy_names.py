"""The strategies there are, by the names that ``--parallel`` takes."""

from __future__ import annotations

from typing import Literal

WHOLE = ("single", "ddp", "fsdp")
"""Strategies that do not split the model into stages: each rank computes all of it."""

Parallel = Literal[
    "auto",
    "single",
    "ddp",
    "fsdp",
    "mp-basic",
    "gpipe",
    "1f1b",
    "interleaved",
    "zero-bubble",
    "mast",
    "master",
    "bidirectional",
]
