"""One trace per worker of each small net that the tests of a folder split over and over.

What is kept belongs to no test: the first is given what was traced of its own model, and others copies for theirs, as
ranks that are threads are given them. That tracing leaves a model as it was is for ``tests/parallel/trace``.
"""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn

from parallel.trace import trace_alone
from parallel.trace.taken_over import taken_over
from parallel.trace.trace import Traced

_KEPT: list[tuple[Traced, tuple[int, ...], torch.dtype]] = []
_KEEPING = threading.Lock()
_SMALL = 100_000
"""Values in parameters: larger models are not what many tests share."""


@pytest.fixture(autouse=True)
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    anew = trace_alone.trace_as_it_runs

    def trace_once(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> Traced:
        with _KEEPING:
            for kept, *asked in _KEPT:
                if asked == [shape, dtype] and (taken := taken_over(kept, module)):
                    return taken
            traced = anew(module, shape, dtype)
            if sum(parameter.numel() for parameter in module.parameters()) <= _SMALL:
                mine = taken_over(traced, copy.deepcopy(module))
                _KEPT.extend([(mine, shape, dtype)] if mine else [])
            return traced

    monkeypatch.setattr(trace_alone, "trace_as_it_runs", trace_once)
