"""A member of a team that fails in the midst of a pass: the others are told, wait for nothing, and say what they waited
for."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.comm.communicator import CommunicationError, Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.comm.torch_comm import TorchCommunicator
from parallel.engine.engine import Engine
from parallel.engine.step import EngineFault
from parallel.schedule.action import Schedule
from parallel.space import team
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy
from tests.helpers.engine_runs import build, steps_of, train
from tests.helpers.forked import run_ranks
from tests.helpers.watched_comm import WatchedCommunicator

SPATIAL = Strategy("spatial", 2, 1, 2, grid=TeamGrid(2, 1))
MOMENTS = [("irecv", 1, "0F0"), ("iall_reduce", 2, "0F0"), ("iall_reduce", 5, "0B0")]
"""(operation, its number, action that it is in) of what member 1 does not come to."""


class Watch:
    def __init__(self) -> None:
        self.said: list[tuple[int, bool, str]] = []

    def follow(self, schedule: Schedule) -> None:
        pass

    def at(self, position: int, waiting: bool = False, shapes: str = "") -> None:
        self.said.append((position, waiting, shapes))


def leaving(communicator: Communicator, kind: str, number: int, end: Callable[[], None]) -> WatchedCommunicator:
    """A team's way to talk that ends a member before operation ``number`` of one kind."""
    begun: list[str] = []

    def tell(name: str, *_: Any) -> None:
        begun.append("iall_reduce" if name == "all_gather" else name)
        if begun.count(kind) == number:
            end()

    return WatchedCommunicator(communicator, tell)


def losing(communicator: Communicator, kind: str, number: int, end: Any) -> tuple[Engine, Watch]:
    watch = Watch()
    engine = build(communicator, "skips", SPATIAL, steps_of(2), observer=watch)
    if communicator.rank == 1:
        link = engine._work.link
        communicator = link._communicator
        link._communicator = leaving(communicator, kind, number, end)
    return engine, watch


def fail() -> None:
    raise ZeroDivisionError("a fault of its own")


@pytest.mark.parametrize(("kind", "number", "action"), MOMENTS)
def test_others_of_a_team_are_told_whatever_they_wait_for(
    kind: str, number: int, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "iall_reduce":
        monkeypatch.setattr(team, "SMALL_ALL_REDUCE_BYTES", 0)  # as sums of more are
    heard: dict[int, Any] = {}

    def run(communicator: Communicator, _: Any) -> None:
        engine, watch = losing(communicator, kind, number, fail)
        try:
            train(engine, steps_of(2))
        except Exception as fault:
            position, waiting, shapes = watch.said[-1]
            heard[communicator.rank] = fault, str(engine.schedule[0][position]), waiting, shapes
            raise

    with pytest.raises(EngineFault, match=f"^rank 1 failed .ZeroDivisionError.* in {action}"):
        run_on_threads(2, run, timeout_s=20)
    fault, at, waiting, shapes = heard[0]
    assert isinstance(fault, CommunicationError)
    assert (at, waiting) == (action, True)
    what = r"a piece \(.*\) of a map or sum, from rank 1" if kind == "irecv" else r"a sum \(.*\) with rank 1"
    assert re.match(f"waiting for {what}; ", shapes), shapes


def test_a_rank_that_goes_on_waits_no_more() -> None:
    def run(communicator: Communicator, _: Any) -> list[tuple[int, bool, str]]:
        watch = Watch()
        train(build(communicator, "skips", SPATIAL, steps_of(2), observer=watch), steps_of(2))
        return watch.said

    told = [said for each in run_on_threads(2, run) for said in itertools.pairwise(each)]
    waits = [(before, after) for before, after in told if before[2].startswith("waiting for ")]
    assert waits
    assert all(before[1] and not after[1] and before[0] == after[0] for before, after in waits)


def lose_a_neighbour(folder: str) -> None:
    """Member 1 goes in its first backward pass and says nothing; member 0 leaves what it heard in ``folder``."""
    communicator = TorchCommunicator(torch.device("cpu"), 60, 60)
    engine, watch = losing(communicator, "irecv", 10, lambda: os._exit(0))
    try:
        train(engine, steps_of(2))
    except CommunicationError as fault:
        Path(folder, "heard.txt").write_text(f"{watch.said[-1][2]}\n{fault}")
    os._exit(0)


@pytest.mark.process
def test_a_lost_neighbour_is_no_fault_of_the_backward_pass_that_waits_for_it(tmp_path: Path) -> None:
    codes, printed = run_ranks(2, f"{__name__}:lose_a_neighbour", [str(tmp_path)], tmp_path)
    assert codes == [0, 0], printed
    waited, fault = (tmp_path / "heard.txt").read_text().split("\n", 1)
    assert waited.startswith("waiting for a piece (2, ")
    assert "rank 0 of 2: irecv of (2, " in fault
    assert fault.endswith("another rank has ended or hangs: its own message says why")
