"""The strategies there are, by the names that ``--parallel`` takes."""

from __future__ import annotations

from typing import Literal

WHOLE = ("single", "ddp", "fsdp")
"""Strategies that do not split the model into stages: each rank computes all of it."""

TORCH_PIPELINES = {"torch-gpipe": "gpipe", "torch-1f1b": "1f1b"}
"""Pipelines of torch.distributed.pipelining -> the schedule of ours that has the same stages and order."""

Planned = Literal[
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
"""Strategies that a plan may choose."""

Parallel = Literal[Planned, "torch-gpipe", "torch-1f1b"]
