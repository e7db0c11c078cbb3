"""Timing events of a GPU that takes a second to come from each to the next, on a machine without one."""

from __future__ import annotations

import itertools

import pytest
import torch

CUDA = torch.device("cuda", 0)


class FakeEvents:
    """``torch.cuda.Event`` and ``current_stream`` are replaced while ``patch`` lasts.

    Attributes:
        waits: how often the host has waited for one.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        reached, seconds = set[int](), itertools.count()
        fake = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                self.at_s = next(seconds)

            def synchronize(self) -> None:
                fake.waits += 1
                reached.update(range(self.at_s + 1))

            def elapsed_time(self, end: Event) -> float:
                if end.at_s not in reached:
                    raise RuntimeError("device not ready")
                return (end.at_s - self.at_s) * 1000.0

        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "current_stream", lambda device: None)
