"""Which microbatches each rank computes, as a run goes on: as asked, replayed, or as its speeds ask for.

Takes the seconds of each step; gives new shares at the boundary of a step, the same on every rank, and ``shares.csv``,
with which ``--shares`` makes another run change at the same steps.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence

import torch

from app.training.run_folder import CsvLog, RunFolder
from parallel.comm.communicator import Communicator
from parallel.engine.step import StepResult
from parallel.schedule.rebalancing import WINDOW, Rebalancing
from parallel.schedule.shares import CHANGING, Shares, consecutive, rows_of
from parallel.strategy import Strategy

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
        self.shares = tuple(tuple(strategy.share_of(group)) for group in range(strategy.groups))
        begins_with = self.shares
        self._changes = dict(strategy.changes)
        for begin, replayed in strategy.changes:
            if begin <= step:
                self.shares = replayed
        self._rebalancing: Rebalancing | None = None
        if strategy.rebalanced:
            if shares is not None and len(shares) == strategy.groups:
                self.shares = shares
            self._rebalancing = Rebalancing(list(map(len, self.shares)))
        self.begins_with_others = self.shares != begins_with
        self._communicator = communicator
        self._seconds: list[float] = []
        self._warm_up = WARM_UP
        self._log: CsvLog | None = None
        if communicator.rank == 0 and (strategy.rebalanced or self._changes):
            self._log = CsvLog(folder.shares, CHANGING)
            self._log.cut_after(step)
            if step == 0:
                self._write(0)

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
        self._write(step)
        return True

    def _rebalanced(self, rebalancing: Rebalancing, step: int, seconds: Sequence[tuple[int, float]]) -> Shares | None:
        self._warm_up -= 1
        if self._warm_up < 0:
            self._seconds += [each for _, each in seconds]
        if step % WINDOW:
            return None
        table = torch.zeros(self._communicator.world, dtype=torch.float64)
        table[self._communicator.rank] = statistics.median(self._seconds) if self._seconds else 0.0
        self._communicator.all_reduce(table)
        self._seconds = []
        if not (table > 0).all() or not rebalancing.look(table.tolist()):
            return None
        self._warm_up = WARM_UP
        if self._log is not None:
            counts, took = rebalancing.counts, ", ".join(f"{each:.3g}" for each in table.tolist())
            log.warning("shares are %s from step %d on: a microbatch takes %s s", counts, step + 1, took)
        return consecutive(rebalancing.counts)

    def _write(self, step: int) -> None:
        if self._log is not None:
            for row in rows_of(step, self.shares):
                self._log.add(dict(zip(CHANGING, row, strict=True)))
