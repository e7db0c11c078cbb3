"""The step that a run leaves behind: a schedule that can be given back, a picture, a trace."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from app.training.summary import write_step
from parallel.comm.local import LocalCommunicator
from parallel.schedule.text import from_csv
from parallel.strategy import Strategy
from tests.helpers.plain_step import Batch
from tests.helpers.small_nets import batch_of
from tests.parallel.engine.test_engine import build, train


def steps() -> list[Batch]:
    return [batch_of([2, 2, 2], 12, 1, torch.float32)]


def test_schedule_picture_and_trace_are_of_the_step(tmp_path: Path) -> None:
    engine = build(LocalCommunicator(), "skips", Strategy("1f1b", 1, 1, 3), steps())
    train(engine, steps())
    step = write_step(engine, LocalCommunicator(), "1f1b", tmp_path)
    assert step is not None
    timeline = step.measured
    assert sum(step.seconds.values()) == pytest.approx(timeline.makespan_s)
    assert step.seconds["compute"] == pytest.approx(timeline.busy_s(0))
    assert step.simulated.bubble == pytest.approx(0.0)
    actions = from_csv((tmp_path / "schedule.csv").read_text())
    assert [str(action) for action in actions[0]] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    assert [str(span.action) for span in timeline.spans[0]] == ["0F0", "0B0", "0F1", "0B1", "0F2", "0B2"]
    picture = (tmp_path / "schedule.svg").read_text()
    ElementTree.fromstring(picture)
    assert "measured" in picture
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event.get("name") == "0B2" for event in events) == 2  # simulated, measured


def test_nothing_is_written_where_the_model_is_whole(tmp_path: Path) -> None:
    engine = build(LocalCommunicator(), "skips", Strategy("single", 1, 1, 3), steps())
    train(engine, steps())
    assert write_step(engine, LocalCommunicator(), "single", tmp_path) is None
    assert not list(tmp_path.iterdir())
