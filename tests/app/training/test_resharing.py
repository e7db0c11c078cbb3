"""The shares of a run over its starts: which are in force, what ``shares.csv`` says of them, what is not known."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from app.training import resharing
from app.training.resharing import Resharing, changes_in
from app.training.run_folder import RunFolder
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import StepResult
from parallel.schedule.shares import Changes, Shares, read_changes
from parallel.strategy import Strategy

EQUAL, UNLIKE = ((0, 1), (2, 3)), ((0,), (1, 2, 3))
AUTO: dict[str, Any] = {"rebalanced": True}


def started(folder: Path, step: int, restored: Shares | None, took: Any = (), **asked: Any) -> list[Shares]:
    """The shares that each of two ranks has in force after a start at ``step`` and ``took`` steps, each with the
    seconds of a microbatch of either rank, of which it computed two; none: it knows of none."""
    strategy = Strategy("ddp", 2, 1, 4, **asked)

    def rank(communicator: Communicator, _: None) -> Shares:
        running = Resharing(strategy, communicator, RunFolder(folder), step, restored)
        for number, seconds in enumerate(took, step + 1):
            own = seconds[communicator.rank]
            running.after(number, StepResult(0.0, 2, () if own is None else ((0, own), (1, own))))
        return running.shares

    return run_on_threads(2, rank, timeout_s=30)


@pytest.fixture(autouse=True)
def looks_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resharing, "WINDOW", 1)
    monkeypatch.setattr(resharing, "WARM_UP", 0)


def said(folder: Path) -> Changes:
    return read_changes((folder / "shares.csv").read_text())


def test_what_is_computed_again_is_written_again(tmp_path: Path) -> None:
    """Changed at step 2, stopped at step 3, gone on from checkpoints before, at and behind the change."""
    slow = [(3.0, 1.0)] * 3
    assert started(tmp_path, 0, None, slow, **AUTO) == [UNLIKE, UNLIKE]
    assert said(tmp_path) == ((0, EQUAL), (2, UNLIKE))
    for step, shares, changes in [(2, UNLIKE, ((0, EQUAL), (2, UNLIKE))), (1, EQUAL, ((0, EQUAL),))]:
        assert started(tmp_path, step, shares, **AUTO) == [shares, shares]
        assert said(tmp_path) == changes
    assert started(tmp_path, 1, EQUAL, slow, **AUTO) == [UNLIKE, UNLIKE]
    assert said(tmp_path) == ((0, EQUAL), (3, UNLIKE))
    assert changes_in(tmp_path / "shares.csv") == 1


def test_shares_of_another_start_are_written_down(tmp_path: Path) -> None:
    started(tmp_path, 0, None, **AUTO)
    assert started(tmp_path, 5, EQUAL, shares=UNLIKE) == [UNLIKE, UNLIKE]
    assert said(tmp_path) == ((0, EQUAL), (5, UNLIKE))


def test_a_beginning_that_nobody_wrote_down_is_not_replayed(tmp_path: Path) -> None:
    started(tmp_path, 5, UNLIKE, **AUTO)
    with pytest.raises(ValueError, match="of which it has no line: it begins at step 5"):
        said(tmp_path)


def test_shares_of_fixed_counts_leave_no_file(tmp_path: Path) -> None:
    started(tmp_path, 0, None, shares=UNLIKE)
    assert not (tmp_path / "shares.csv").exists()
    assert changes_in(tmp_path / "shares.csv") is None


def test_a_checkpoint_of_other_microbatches_or_groups_begins_equal(tmp_path: Path) -> None:
    for other in (((0,), (1,)), ((0, 1), (2,), (3,))):
        assert started(tmp_path, 5, other, **AUTO) == [EQUAL, EQUAL]


def test_a_run_that_replays_its_own_file_keeps_it(tmp_path: Path) -> None:
    started(tmp_path, 0, None, [(3.0, 1.0)] * 3, **AUTO)
    before = said(tmp_path)
    assert started(tmp_path, 1, EQUAL, [(1.0, 1.0)], shares=EQUAL, changes=before[1:]) == [UNLIKE, UNLIKE]
    assert said(tmp_path) == before


def test_what_is_not_known_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert started(tmp_path, 0, None, [(None, 1.0)] * 4, **AUTO) == [EQUAL, EQUAL]
    (line,) = caplog.messages
    assert "what a microbatch takes ranks 0 is not known" in line


def test_a_change_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        started(tmp_path, 0, None, [(3.0, 1.0)] * 3, **AUTO)
    assert caplog.messages == ["shares are 1, 3 from step 3 on: a microbatch takes 3, 1 s"]
