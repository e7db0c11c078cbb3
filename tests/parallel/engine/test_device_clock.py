"""On a GPU an action's seconds are those between its events, not those in which the host queued its kernels."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from parallel.comm.local import LocalCommunicator
from parallel.engine.device_clock import DeviceClock
from parallel.engine.own_time import OwnTime
from parallel.engine.step import Microbatch
from parallel.strategy import Strategy
from tests.helpers.engine_runs import build, train
from tests.helpers.fake_events import CUDA, FakeEvents
from tests.helpers.small_nets import batch_of


def test_spans_come_from_events_that_only_who_asks_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [batch_of([2, 2, 2], 12, 1, torch.float32)] * 2
    engine = build(LocalCommunicator(), "skips", Strategy("1f1b", 1, 1, 3), steps)
    events = FakeEvents(monkeypatch)
    engine._clock = DeviceClock(CUDA)
    train(engine, steps)
    assert events.waits == 0, "a step does not wait for its events"
    spans = engine.spans()
    assert events.waits > 0
    assert [str(span.action) for span in spans] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    assert [span.duration_s for span in spans] == pytest.approx([1.0] * 6)
    assert [span.start_s - spans[0].start_s for span in spans] == pytest.approx([0, 2, 4, 6, 8, 10])
    assert spans[-1].end_s == pytest.approx(time.perf_counter() - 1, abs=0.5), "in the host's seconds"


def test_own_seconds_come_from_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each microbatch begins and ends with an event; the wait for the sums begins with its last microbatch's end."""
    events = FakeEvents(monkeypatch)
    watch = OwnTime(nn.Linear(2, 2).parameters(), CUDA)
    watch.begin_step()
    for i in (0, 1):
        watch.begun(Microbatch(None, None, (1, 3, 4, 4)))
        watch.end(i)
    watch.summed()
    assert events.waits == 0
    assert (watch.seconds, watch.waited_s) == (((0, 1.0), (1, 1.0)), 1.0)
    watch.begin_step()
    watch.begun(Microbatch(None, None, (1, 3, 4, 4)))
    watch.end(0, summed=True)
    assert (watch.seconds, watch.waited_s) == ((), None), "not known where the backward pass itself sums"
