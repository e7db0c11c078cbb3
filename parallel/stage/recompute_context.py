"""The context in which a segment is computed again: precision, random numbers and statistics of its first pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parallel.offload.rng import drawing, get_random_state
from parallel.stage.batchnorm import RunningStatistics
from parallel.trace.stage_module import SegmentRun

Precision = Callable[[], contextlib.AbstractContextManager[Any]]
"""Gives a new context that switches autocast as the stage is run."""


def recompute_context(
    segment: SegmentRun, device: torch.device, statistics: RunningStatistics, precision: Precision
) -> contextlib.AbstractContextManager[None]:
    """Return a context with what the pass that is about to begin finds; it is entered once, later.

    Args:
        segment: that is computed.
        device: of the stage.
        statistics: of the stage's normalisation layers.
        precision: of the stage.
    """
    start = get_random_state(device) if segment.uses_rng else None

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with contextlib.ExitStack() as scopes:
            if start is not None:
                scopes.enter_context(drawing(start, device))
            scopes.enter_context(precision())
            scopes.enter_context(statistics.frozen(segment.modules))
            yield

    return context()
