"""On a GPU an action's seconds are those between its events, not those in which the host queued its kernels."""

from __future__ import annotations

import time

import pytest
import torch

from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.device_clock import DeviceClock
from parallel.engine.step import Microbatch, StepResult
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
    assert events.waits == len(steps), "a step waits for its last loss alone"
    spans = engine.spans()
    assert events.waits > len(steps)
    assert [str(span.action) for span in spans] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    assert [span.duration_s for span in spans] == pytest.approx([1.0] * 6)
    assert [span.start_s - spans[0].start_s for span in spans] == pytest.approx([0, 2, 4, 6, 8, 10])
    assert spans[-1].end_s == pytest.approx(time.perf_counter() - 1, abs=0.5), "in the host's seconds"


def test_own_seconds_come_from_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each microbatch begins and ends with an event; the wait for the sums begins with the last one's end."""
    batch = batch_of([2, 2], 12, 1, torch.float32)
    strategy = Strategy("ddp", 2, 1, 2)

    def step(communicator: Communicator, _: None) -> StepResult:
        engine = build(communicator, "skips", strategy, [batch])
        engine._clock = DeviceClock(CUDA)
        (i,) = engine.share
        return engine.step([Microbatch(*batch[i], tuple(batch[i][0].shape))], 0, 0.1)

    FakeEvents(monkeypatch)
    for rank, result in enumerate(run_on_threads(2, step, None, timeout_s=60)):
        assert [i for i, _ in result.seconds] == [rank]
        assert result.seconds[0][1] >= 3.0, "forward and backward, an event before and after each"
        assert result.waited_s is not None
        assert result.waited_s >= 1.0
