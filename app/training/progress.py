"""What a run tells while it runs: a progress bar on a terminal, plain lines elsewhere; always also the log."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.settings.launcher import find_launch

log = logging.getLogger("app.train")

LINE_EVERY_S = 10.0
"""Without a terminal: at most one line of steps in this many seconds."""


class RunProgress:
    """Steps done of ``total``, with the latest figures.

    Args:
        total: steps of the whole run.
        done: steps finished before, when resumed.
        quiet: print nothing (all ranks but the first).
    """

    def __init__(self, total: int, done: int, quiet: bool) -> None:
        self._total = total
        self._quiet = quiet
        self._last_line_s = 0.0
        self._bar: Progress | None = None
        launch = find_launch()
        # Open MPI gives its ranks a terminal, wherever its own output goes.
        if not quiet and sys.stdout.isatty() and not (launch and launch.mpi):
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
            )
            self._task = self._bar.add_task("training", total=total, completed=done, figures="")

    def step(self, done: int, loss: float, images_per_second: float) -> None:
        """``done`` steps are finished."""
        figures = f"loss {loss:.4f}  {images_per_second:.2f} images/s"
        if self._bar:
            self._bar.update(self._task, completed=done, figures=figures)
        elif not self._quiet:
            now = time.monotonic()
            if now - self._last_line_s >= LINE_EVERY_S or done == self._total:
                self._last_line_s = now
                print(f"step {done}/{self._total}  {figures}", flush=True)

    def say(self, line: str) -> None:
        """A line that stays, above the bar, and in the log."""
        if self._quiet:
            return
        log.info(line)
        if self._bar:
            self._bar.console.print(line, highlight=False, markup=False)
        else:
            print(line, flush=True)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()
