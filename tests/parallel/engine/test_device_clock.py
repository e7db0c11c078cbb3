"""On a GPU an action's seconds are those between its events, not those in which the host queued its kernels; the
seconds of a rank leave out its wait for others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.whole_engine import whole_engine
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.device_clock import DeviceClock
from parallel.engine.step import Microbatch, StepResult
from parallel.strategy import Strategy
from tests.helpers.engine_runs import SGD, build, train
from tests.helpers.fake_events import CUDA, FakeEvents
from tests.helpers.ranks import run_on_ranks
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


LATE_S = 0.2
TARGET = "tests.parallel.engine.test_device_clock:step_beside_a_late_rank"


class Sleeping(nn.Module):
    """Takes ``seconds`` for a backward pass: forward passes of threads draw random numbers in turn."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x.mean(dim=(2, 3)))
        output.register_hook(lambda _: time.sleep(self.seconds))
        return output


def step_beside_a_late_rank(communicator: Communicator, _: Any) -> dict[str, Any]:
    """The second of two steps, of four microbatches; the last rank takes ``LATE_S`` for each of its own."""
    torch.manual_seed(0)
    model = Sleeping(LATE_S * (communicator.rank == communicator.world - 1))
    engine = whole_engine(model, F.cross_entropy, SGD, communicator, batch=4, m=4, shape=(1, 3, 4, 4))
    for number in range(2):
        one = Microbatch(torch.zeros(1, 3, 4, 4), torch.zeros(1, dtype=torch.int64), (1, 3, 4, 4))
        result = engine.step((one for _ in engine.share), number, 0.1)
    return {"seconds": result.seconds, "waited_s": result.waited_s}


@pytest.mark.parametrize("launcher", ["threads", pytest.param("forked", marks=pytest.mark.process)])
def test_own_seconds_leave_out_the_wait_for_others(launcher: Any, tmp_path: Path) -> None:
    early, late = run_on_ranks(2, TARGET, tmp_path, launcher=launcher)
    assert [i for i, _ in early["seconds"]] == [0, 1]
    assert [i for i, _ in late["seconds"]] == [2, 3]
    assert all(seconds >= LATE_S for _, seconds in late["seconds"])
    assert early["waited_s"] > LATE_S, "the late rank is still at its second microbatch"
    assert sum(seconds for _, seconds in early["seconds"]) < early["waited_s"]
    assert late["waited_s"] < LATE_S


def test_one_rank_waits_for_nobody(tmp_path: Path) -> None:
    (alone,) = run_on_ranks(1, TARGET, tmp_path, launcher="threads")
    assert alone == {"seconds": (), "waited_s": None}
