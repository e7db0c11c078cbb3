"""Progress of a run: a bar on a terminal, plain lines elsewhere; always also the log."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from app.settings.launcher import MPI
from pipelines.catalog.table import counted
from pipelines.tiles.index import SlideDone

log = logging.getLogger("app.train")

LINE_EVERY_S = 10.0
"""Without a terminal: at most one line of steps or slides in this many seconds."""
LINE_CELLS = 80
"""Without a terminal: a line of slides is this long at most."""
FAILED_SHOWN = 10
"""As many slides that failed are told of with the reason as soon as they do; the log has all."""
NAME_CELLS = 12
"""A slide's name that would have to be shorter is left out."""


def log_to(path: Path) -> None:
    """Write everything logged to the file ``path``."""
    handler = logging.FileHandler(path, errors="backslashreplace")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)


def say(line: str, logger: logging.Logger = log) -> None:
    """Print a line, and log it."""
    print(line, flush=True)
    logger.info(line)


def _on_terminal() -> bool:
    # Open MPI gives its ranks a terminal, wherever its own output goes.
    return sys.stdout.isatty() and not any(names[0] in os.environ for names in MPI)


def shortened(name: str, cells: int) -> str:
    """Return ``name`` as it fits into ``cells`` columns of a terminal: whole, or without its middle."""
    if cell_len(name) <= cells:
        return name
    tail = (cells - 1) // 2
    return f"{set_cell_size(name, cells - 1 - tail)}…{set_cell_size(name[::-1], tail)[::-1]}"


class IndexProgress:
    """Slides that were indexed: one line that changes on a terminal, now and then a line elsewhere. The first that
    failed stay, each on a line of its own."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._failed = 0
        self._begun_s = self._last_line_s = time.monotonic()
        self._console = Console()
        self._status = self._console.status("indexing") if _on_terminal() else None

    def __call__(self, told: str | SlideDone) -> None:
        """Show what ``build_index`` tells."""
        if isinstance(told, str):
            self._say(told)
            return
        self._failed += told.failed
        if told.failed and self._failed <= FAILED_SHOWN:
            self._console.print(Text(str(told)), soft_wrap=True)
        now = time.monotonic()
        elapsed_s = now - self._begun_s
        failed = f", {self._failed} failed" if self._failed else ""
        if told.done == told.total:
            self.close()
            self._say(f"indexed {counted(told.total, 'slide')} in {timedelta(seconds=round(elapsed_s))}{failed}")
        elif self._status is not None:
            line = self._line(told, elapsed_s, failed, self._console.width - len("* "))
            self._status.update(Text(line))
            self._status.start()
        elif now - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now
            print(self._line(told, elapsed_s, failed, LINE_CELLS), flush=True)

    def _line(self, told: SlideDone, elapsed_s: float, failed: str, cells: int) -> str:
        per_minute = 60 * told.done / max(elapsed_s, 1e-3)
        left = timedelta(seconds=round((told.total - told.done) * elapsed_s / told.done))
        rate = f"{per_minute / 60:.3g}/s" if per_minute >= 60 else f"{per_minute:.3g}/min"
        line = f"indexing: {told.done}/{told.total} slides, {rate}, {left} left{failed}"
        for_name = cells - len(line) - 2
        return f"{line}  {shortened(told.slide_id, for_name)}" if for_name >= NAME_CELLS else line[:cells]

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()


class RunProgress:
    """Steps done of ``total``, with the latest figures.

    Args:
        quiet: print nothing (all ranks but the first).
    """

    def __init__(self, total: int, done: int, quiet: bool) -> None:
        self._total, self._quiet, self._last_line_s = total, quiet, 0.0
        self._bar: Progress | None = None
        if not quiet and _on_terminal():
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
            )
            self._task = self._bar.add_task("training", total=total, completed=done, figures="")
            self._bar.start()

    def step(self, done: int, loss: float, images_per_second: float) -> None:
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
        if self._bar:
            log.info(line)
            self._bar.console.print(line, highlight=False, markup=False)
        elif not self._quiet:
            say(line)

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
