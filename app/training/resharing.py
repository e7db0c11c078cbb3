"""Which microbatches each rank computes, as a run continues: as asked, replayed, or as its speeds ask for.

Takes the seconds of each step; gives new shares at the boundary of a step, the same on every rank, and ``shares.csv``,
with which ``--shares`` makes another run change at the same steps.
"""

from __future__ import annotations

import csv
import logging
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch

from app.training.run_folder import CsvLog, RunFolder
from parallel.comm.communicator import Communicator
from parallel.engine.step import StepResult
from parallel.schedule.shares import CHANGING, WINDOW, Changes, Rebalancing, Shares, consecutive, read_changes, rows_of
from parallel.strategy import Strategy


class SharesLog:
    """The file as one run writes it; the first rank has one.

    Args:
        path: of the file; what it says of steps that are computed again is dropped.
        step: steps done when the run starts.
        shares: in force then.
    """

    def __init__(self, path: Path, step: int, shares: Shares) -> None:
        self._log = CsvLog(path, CHANGING)
        self._log.cut_after(step)
        if _last_rows(path) != [list(map(str, row[1:])) for row in rows_of(step, shares)]:
            self._log.cut_after(step - 1)
            self.add(step, shares)

    def add(self, step: int, shares: Shares) -> None:
        """``shares`` are in force once ``step`` steps are done."""
        for row in rows_of(step, shares):
            self._log.add(dict(zip(CHANGING, row, strict=True)))


def _last_rows(path: Path) -> list[list[str]]:
    """Microbatch and group of the last step that the file knows of."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [row[1:] for row in rows if row[0] == rows[-1][0]]


def says(path: Path, changes: Changes) -> bool:
    """Return whether the file is there with this content: a run that replays its own file leaves it as it is, since a
    later attempt reads it."""
    if not path.exists():
        return False
    try:
        return read_changes(path.read_text()) == changes
    except ValueError:
        return False


def changes_in(path: Path) -> int | None:
    """Return the number of changes of the shares over the whole run; None: it was not recorded."""
    if not path.exists():
        return None
    with path.open(newline="") as file:
        return max(0, len({row[0] for row in csv.reader(file)}) - 2)


log = logging.getLogger(__name__)

WARM_UP = 2
"""Steps after a start or a change whose seconds are not looked at: memory grows, files are opened."""


class Resharing:
    """The shares of one run.

    Args:
        strategy: as the run was asked for.
        communicator: of all ranks.
        folder: of the run.
        step: steps done when the run starts.
        shares: in force then; None: as the strategy begins.

    Attributes:
        shares: of each group, in force now.
        begins_with_others: than the strategy.
    """

    def __init__(
        self, strategy: Strategy, communicator: Communicator, folder: RunFolder, step: int, shares: Shares | None
    ) -> None:
        begins_with = tuple(tuple(strategy.share_of(group)) for group in range(strategy.groups))
        self.shares = begins_with
        self._changes = dict(strategy.changes)
        for begin, replayed in strategy.changes:
            if begin <= step:
                self.shares = replayed
        self._group_of = strategy.mesh.group_of
        self._rebalancing: Rebalancing | None = None
        if strategy.rebalanced:
            if shares is not None and _sizes(shares) == _sizes(begins_with):
                self.shares = shares
            self._rebalancing = Rebalancing(list(map(len, self.shares)))
        self.begins_with_others = self.shares != begins_with
        self._communicator = communicator
        self._seconds: list[float] = []
        self._counted = 0
        self._told = False
        self._warm_up = WARM_UP
        self._log: SharesLog | None = None
        kept = strategy.rebalanced or self._changes or folder.shares.exists()
        asked = ((0, strategy.shares), *strategy.changes)
        if communicator.rank == 0 and kept and not says(folder.shares, asked):
            self._log = SharesLog(folder.shares, step, self.shares)

    def after(self, step: int, result: StepResult) -> bool:
        """Take what this rank's microbatches took; True where other shares are in force once ``step`` steps are done.

        Every rank calls it after every step.
        """
        shares = self._changes.get(step)
        if self._rebalancing is not None:
            shares = self._rebalanced(self._rebalancing, step, result.seconds)
        if shares is None:
            return False
        self.shares = shares
        if self._log is not None:
            self._log.add(step, shares)
        return True

    def _rebalanced(self, rebalancing: Rebalancing, step: int, seconds: Sequence[tuple[int, float]]) -> Shares | None:
        self._warm_up -= 1
        if self._warm_up < 0:
            self._counted += 1
            self._seconds += [each for _, each in seconds]
        if step % WINDOW:
            return None
        median_s = statistics.median(self._seconds) if self._seconds else 0.0
        of_ranks: list[float] = self._communicator.all_gather(torch.tensor(median_s, dtype=torch.float64)).tolist()
        counted, self._counted, self._seconds = self._counted, 0, []
        if unknown := [rank for rank, each in enumerate(of_ranks) if not each > 0]:
            if counted:
                self._tell_unknown(unknown)
            return None
        # A group is done with a microbatch when the last of its ranks is.
        of_groups = [0.0] * len(self.shares)
        for rank, each in enumerate(of_ranks):
            of_groups[self._group_of(rank)] = max(each, of_groups[self._group_of(rank)])
        if not rebalancing.look(of_groups):
            return None
        self._warm_up = WARM_UP
        if self._communicator.rank == 0:
            counts, took = ", ".join(map(str, rebalancing.counts)), ", ".join(f"{each:.3g}" for each in of_groups)
            log.warning("shares are %s from step %d on: a microbatch takes %s s", counts, step + 1, took)
        return consecutive(rebalancing.counts)

    def _tell_unknown(self, ranks: list[int]) -> None:
        """Warn that the times of pipelines of GPUs are not measured."""
        if self._communicator.rank == 0 and not self._told:
            log.warning(
                "shares stay as they are: what a microbatch takes ranks %s is not known, as pipelines of GPUs are not "
                "measured; give counts, such as --shares 3,1",
                ", ".join(map(str, ranks)),
            )
        self._told = True


def _sizes(shares: Shares) -> tuple[int, int]:
    """Groups, and microbatches of all of them."""
    return len(shares), sum(map(len, shares))
