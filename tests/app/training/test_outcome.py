"""Speeds, idle time and shares of a run, from the times of its steps."""

import io
import logging
import re
import resource
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from app.training import progress as module
from app.training import resharing
from app.training.outcome import UNKNOWN, WARM_UP, IdleTime, Throughput, peak_resident_bytes
from app.training.progress import IndexProgress
from app.training.resharing import Resharing, changes_in
from app.training.run_folder import RunFolder
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import StepResult
from parallel.schedule.shares import read_changes
from parallel.strategy import Strategy
from pipelines.tiles.index import SlideDone


@pytest.mark.parametrize(
    ("steps", "waits", "rests", "median", "sustained", "waited"),
    [
        ([], [], [], None, None, None),
        # What comes between steps is in the sustained speed alone; the first two steps warm up.
        ([100, 100, 2, 2, 5], [0, 0, 1, 0, 0.8], [50, 50, 0, 7, 99], 8 / 2, 3 * 8 / (2 + 2 + 5 + 7), 1.8 / 9),
        ([100, 4], [0, 0], [3, 4], 2, 2, 0),  # as short as the warm-up: the last step
    ],
)
def test_speeds_of_steps(steps, waits, rests, median, sustained, waited):
    speed = Throughput(8)
    for step_s, wait_s, rest_s in zip(steps, waits, rests, strict=True):
        speed.add(float(step_s), float(wait_s))
        speed.rest_s.append(float(rest_s))
    assert WARM_UP == 2
    assert (speed.images_per_second, speed.images_per_second_sustained) == (median, sustained)
    assert speed.data_wait_fraction == (waited if waited is None else pytest.approx(waited))


def test_the_published_rows_of_a_cpu_and_two_gpus():
    """Choi 2019: batches of 1.9 s on average on each of three workers, which end at 2.5, 2.3 and 1.8 s: of 19.8
    seconds of workers 2.7 are idle."""
    idle = IdleTime(3)
    for took in [[9.0, 1.0, 1.0]] * WARM_UP + [[1.9, 2.5, 2.5], [2.3, 1.4, 1.4], [1.5, 1.8, 1.8]]:
        sum_s = 0.25
        waited = [IdleTime.to_microseconds(max(took) - each + sum_s) for each in took]
        idle.add(waited, max(took))
    fractions = idle.fractions
    assert fractions == pytest.approx([0.9 / 6.6, 0.9 / 6.6, 0.9 / 6.6])
    assert sum(fractions) / 3 == pytest.approx(0.1364, abs=1e-4)


def test_idle_time_that_is_not_known_or_of_one_rank_is_left_out():
    idle, alone = IdleTime(2), IdleTime(1)
    for _ in range(WARM_UP + 2):
        idle.add([IdleTime.to_microseconds(None), 5], 1.0)
        alone.add([3], 1.0)
    assert (idle.fractions, alone.fractions) == (None, None)
    idle.add([IdleTime.to_microseconds(0.5), IdleTime.to_microseconds(0.1)], 1.0)
    assert idle.fractions == pytest.approx([0.4, 0.0])
    assert IdleTime.to_microseconds(None) == UNKNOWN


def test_peak_memory_is_known_without_a_line_of_the_kernel(monkeypatch):
    """A run under gVisor, whose process table has no peak, failed at its end."""
    monkeypatch.setattr(Path, "read_text", lambda _: "VmRSS:\t7 kB\n")
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=9))
    assert peak_resident_bytes() == 9 * 1024


EQUAL, UNLIKE = ((0, 1), (2, 3)), ((0,), (1, 2, 3))
AUTO = {"rebalanced": True}


def started(folder, step, restored, took=(), **asked):
    """The shares that each of two ranks has in force after a start at ``step`` and ``took`` steps, each with the
    seconds of a microbatch of either rank, of which it computed two; none: it knows of none."""
    strategy = Strategy("ddp", 2, 1, 4, **asked)

    def rank(communicator, _):
        running = Resharing(strategy, communicator, RunFolder(folder), step, restored)
        for number, seconds in enumerate(took, step + 1):
            own = seconds[communicator.rank]
            running.after(number, StepResult(0.0, 2, () if own is None else ((0, own), (1, own))))
        return running.shares

    return run_on_threads(2, rank, timeout_s=30)


@pytest.fixture(autouse=True)
def looks_each_step(monkeypatch):
    monkeypatch.setattr(resharing, "WINDOW", 1)
    monkeypatch.setattr(resharing, "WARM_UP", 0)


def said(folder):
    return read_changes((folder / "shares.csv").read_text())


def test_what_is_computed_again_is_written_again(tmp_path):
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


def test_shares_of_another_start_are_written_down_unless_their_beginning_is_unknown(tmp_path):
    started(tmp_path, 0, None, **AUTO)
    assert started(tmp_path, 5, EQUAL, shares=UNLIKE) == [UNLIKE, UNLIKE]
    assert said(tmp_path) == ((0, EQUAL), (5, UNLIKE))
    (tmp_path / "new").mkdir()
    started(tmp_path / "new", 5, UNLIKE, **AUTO)
    with pytest.raises(ValueError, match="of which it has no line: it begins at step 5"):
        said(tmp_path / "new")


def test_shares_of_fixed_counts_leave_no_file_and_other_microbatches_or_groups_begin_equal(tmp_path):
    started(tmp_path, 0, None, shares=UNLIKE)
    assert not (tmp_path / "shares.csv").exists()
    assert changes_in(tmp_path / "shares.csv") is None
    for other in (((0,), (1,)), ((0, 1), (2,), (3,))):
        assert started(tmp_path, 5, other, **AUTO) == [EQUAL, EQUAL]


def test_a_run_that_replays_its_own_file_keeps_it(tmp_path):
    started(tmp_path, 0, None, [(3.0, 1.0)] * 3, **AUTO)
    before = said(tmp_path)
    assert started(tmp_path, 1, EQUAL, [(1.0, 1.0)], shares=EQUAL, changes=before[1:]) == [UNLIKE, UNLIKE]
    assert said(tmp_path) == before


@pytest.mark.parametrize(
    ("took", "shares", "line"),
    [
        ([(None, 1.0)] * 4, EQUAL, "what a microbatch takes ranks 0 is not known"),
        ([(3.0, 1.0)] * 3, UNLIKE, "shares are 1, 3 from step 3 on: a microbatch takes 3, 1 s"),
    ],
)
def test_a_change_and_what_is_not_known_are_said_once(took, shares, line, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert started(tmp_path, 0, None, took, **AUTO) == [shares, shares]
    (message,) = caplog.messages
    assert line in message


NAMES = [f"{k:064x}" for k in range(6)]


def done(k, *, failed=False):
    return SlideDone(k, 6, NAMES[k - 1], "13 tiles", failed)


def test_elsewhere_a_line_comes_now_and_then_and_at_the_end(monkeypatch, capsys):
    now = iter([0.0, 4.0, 10.0, 12.0, 19.0, 20.0, 24.0])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    said = []
    with closing(IndexProgress(said.append)) as progress:
        progress("3 slides are there already")
        for k in range(1, 7):
            progress(done(k, failed=k == 4))
    printed = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in printed] == [
        "indexing: 2/6 slides, 12/min, 0:00:20 left",
        "4/6",
        "indexing: 5/6 slides, 15/min, 0:00:04 left, 1 failed",
    ]
    assert all(len(line) <= 80 and "000…000" in line for line in (printed[0], printed[2]))
    assert printed[1] == f"4/6  {NAMES[3]}: 13 tiles"
    assert said == ["3 slides are there already", "indexed 6 slides in 0:00:24, 1 failed"]


@pytest.mark.parametrize("width", [40, 80])
def test_on_a_terminal_it_is_one_line_that_changes(width, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(module, "_on_terminal", lambda: True)
    monkeypatch.setattr(module, "Console", lambda: Console(file=screen, force_terminal=True, width=width))
    with closing(IndexProgress(lambda line: None)) as progress:
        for k in range(1, 6):
            progress(done(k))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    assert shown.count("\n") == 1  # when it ends
    assert max(map(len, re.split("[\r\n]", shown))) <= width
    assert "5/6 slides" in shown
