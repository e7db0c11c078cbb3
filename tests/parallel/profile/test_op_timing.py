"""An accelerator is given several runs between two readings of the clock: launching one is not what is timed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from parallel.profile import op_timing
from parallel.profile.op_timing import LEAST_S, MOVING, SIDE_BY_SIDE, Moving, Setting, time_moving

KNOWN = tuple(MOVING)


@pytest.mark.parametrize(("device", "at_once"), [("cpu", 1), ("meta", SIDE_BY_SIDE)])
def test_runs_between_two_readings_of_the_clock(device: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()
    begun: list[int] = []  # by the clock

    def clock() -> float:
        return float(next(seconds))

    def relu(images: Tensor) -> Tensor:
        begun.append(len(reads))
        return torch.relu(images)

    reads: list[float] = []
    monkeypatch.setitem(MOVING, "relu", Moving(relu))
    monkeypatch.setattr(op_timing, "now", lambda setting: reads.append(clock()) or reads[-1])
    monkeypatch.setattr(op_timing, "empty_backward_s", op_timing.empty_backward_s.__wrapped__)  # by this clock alone
    setting = Setting(torch.device(device))
    _, reading = time_moving("relu", torch.ones(1, 2, 3, 3, device=device), setting)
    assert [begun.count(read) for read in dict.fromkeys(begun)] == [at_once] * len(set(begun))
    assert reading.forward_s == 1 / at_once
    assert reading.input_s == LEAST_S  # as long as an empty one by this clock


@pytest.mark.parametrize("name", KNOWN)
def test_every_operation_runs_side_by_side(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_timing, "LEAST_RUNS", 1)
    monkeypatch.setattr(op_timing, "MOST_RUNS", 1)
    setting = Setting(torch.device("meta"))
    op, reading = time_moving(name, setting.tensor(1, 8, 4, 4), setting)
    assert op.name == name
    assert reading.forward_s > 0
