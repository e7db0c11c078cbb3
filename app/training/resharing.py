"""Microbatches that each rank computes, as a run continues: as requested, replayed, or by measured speed.

Takes the seconds of each step; returns new shares at the boundary of a step, the same on every rank, and
``shares.csv``, with which ``--shares`` makes another run change at the same steps.
"""

from __future__ import annotations

import contextlib
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

log = logging.getLogger(__name__)
WARM_UP = 2
"""Steps after a start or a change whose seconds are not looked at: memory grows, files are opened."""


def says(path: Path, changes: Changes) -> bool:
    """Return whether the file is there with this content: a run that replays its own file leaves it as it is, since a
    later attempt reads it."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return read_changes(path.read_text()) == changes
    return False


def changes_in(path: Path) -> int | None:
    """Return the number of changes of the shares over the whole run; None: it was not recorded."""
    if not path.exists():
        return None
    with path.open(newline="") as file:
        return max(0, len({row[0] for row in csv.reader(file)}) - 2)


class Resharing:
    """The shares of one run.

    Args:
        step: steps done when the run starts.
        shares: in force then; None: as the strategy begins.

    Attributes:
        shares: of each group, in force now.
        differs_at_start: the run begins with other shares than the strategy.
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
        self.differs_at_start = self.shares != begins_with
        self._communicator = communicator
        self._seconds: list[float] = []
        self._counted = 0
        self._warned = False
        self._warm_up = WARM_UP
        self._log: CsvLog | None = None
        kept = strategy.rebalanced or self._changes or folder.shares.exists()
        asked = ((0, strategy.shares), *strategy.changes)
        if communicator.rank == 0 and kept and not says(folder.shares, asked):
            self._log = CsvLog(folder.shares, CHANGING)
            self._log.cut_after(step)
            kept_rows = self._log.rows()
            last = [row[1:] for row in kept_rows if row[0] == kept_rows[-1][0]]  # microbatch and group
            if last != [list(map(str, row[1:])) for row in rows_of(step, self.shares)]:
                self._log.cut_after(step - 1)
                self._record(step)

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
        self._record(step)
        return True

    def _record(self, step: int) -> None:
        """Write that the shares are in force once ``step`` steps are done."""
        if self._log is not None:
            for row in rows_of(step, self.shares):
                self._log.add(dict(zip(CHANGING, row, strict=True)))

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
            if counted and self._communicator.rank == 0 and not self._warned:
                reason = "what a microbatch takes ranks %s is not known, as pipelines of GPUs are not measured"
                text = f"shares stay as they are: {reason}; give counts, such as --shares 3,1"
                log.warning(text, ", ".join(map(str, unknown)))
                self._warned = True
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


def _sizes(shares: Shares) -> tuple[int, int]:
    """Groups, and microbatches of all of them."""
    return len(shares), sum(map(len, shares))
