"""What a segment is computed again in: the precision, the random numbers and the statistics of its first pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from parallel.offload.updated_buffers import UpdatedBuffers
from parallel.stage.batchnorm import RunningStatistics
from parallel.stage.rng import drawing, get_random_state
from parallel.trace.stage_module import SegmentRun

Precision = Callable[[], contextlib.AbstractContextManager[Any]]


def surroundings(
    segment: SegmentRun,
    device: torch.device,
    statistics: RunningStatistics,
    precision: Precision,
    updated: UpdatedBuffers,
) -> contextlib.AbstractContextManager[None]:
    """Those of a pass that is about to begin; entered once, later."""
    start = get_random_state(device) if segment.uses_rng else None
    values = updated.values()

    @contextlib.contextmanager
    def again() -> Iterator[None]:
        with contextlib.ExitStack() as scopes:
            if start is not None:
                scopes.enter_context(drawing(start, device))
            scopes.enter_context(precision())
            scopes.enter_context(statistics.frozen(segment.modules))
            scopes.enter_context(updated.as_of(values))
            yield

    return again()
