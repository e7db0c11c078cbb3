"""The run folder: where everything a run leaves is, and how it is written so that a resumed run continues it.

``config.yaml env.json attempts.json run.lock rank0.lock plan.json run.log tissue/ tiles.parquet stains.json splits.csv
metrics.csv validation.csv predictions.csv checkpoints/{last,best}.pt failed_slides.csv summary.json report.html
tensorboard/``, ``mlflow.json`` with ``--mlflow``, ``shares.csv`` where shares may change, ``pushes.csv`` of a
parameter server, and ``fault.txt`` of a run that failed on several ranks (``fault-2.txt`` of its second attempt). A
model split into stages also leaves ``schedule.csv schedule.svg trace.json``.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from app.launch.host import lock_folder
from app.settings.fields import differing, flat, read_data, write_json
from app.settings.launcher import Attempts
from app.settings.run import EPOCHS, DataSettings, RunConfig
from app.training.progress import log_to
from pipelines.catalog.table import names_file, write_rows
from pipelines.slides.whole_files import write_text

FREE_TO_CHANGE = {
    *("resume", "extend", "max_restarts", "min_ranks", "out", "mlflow", "index_workers"),
    *("slides", "labels", "annotations", "mpp_table"),
    *("parallel", "ranks", "stages", "grid", "shares", "chunks", "cuts", "schedule", "stream", "zero", "compile"),
    *("staleness", "push_rate"),
    *("recompute", "recompute_runs", "offload", "offload_ahead", "offload_host", "offload_state"),
    *("memory", "memory_excess", "gradient_buckets", "device", "cpu_ranks", "mixed_sums", "channels_last"),
    *("timeout_s", "join_timeout_s", "read_threads", "read_ahead", "cache", "cache_bytes", "device_prefetch"),
    *("checkpoint_every", "checkpoint_overhead", "checkpoint_write"),
    *("validate_every", "patience", "positive_class", "twin_steps", "precision", "microbatches"),
}
"""Settings that may differ when a run is resumed: they change where it runs, not its numbers. Data may
move: the index refuses other values in ``mpp_table``, the stream other labels and annotations of training slides.
``splits`` may not: a resumed run does not read it. The file of ``weights`` may move, but keeps its name. ``precision``,
``microbatches``, and under async the ranks, ``staleness`` and ``push_rate`` change the numbers: ``TrainingLoop`` warns
of that."""
LENGTH = ("steps", "epochs")
"""Settings of the end of a run, which the learning rate depends on: they may grow with ``--extend``."""


class RunFolder:
    """Paths of one run, and the files that grow while it runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.splits = path / "splits.csv"
        self.metrics = path / "metrics.csv"
        self.validation = path / "validation.csv"
        self.shares = path / "shares.csv"
        self.pushes = path / "pushes.csv"
        self.predictions = path / "predictions.csv"
        self.summary = path / "summary.json"
        self.failed_slides = path / "failed_slides.csv"
        self._attempts = path / "attempts.json"
        self.last = path / "checkpoints" / "last.pt"
        self.best = path / "checkpoints" / "best.pt"

    @contextlib.contextmanager
    def in_use(self, *, starts: bool, writes: bool) -> Iterator[None]:
        """Hold the folder for this run alone, with two locks, as ranks may outlive their launcher for a moment.

        Args:
            starts: this process was started by the user or by a launcher of his, not by ``--ranks``.
            writes: this process is the first rank.

        Raises:
            RunError: another run is there (named), or the folder cannot be written.
        """
        with contextlib.ExitStack() as locks:
            if starts:
                locks.enter_context(lock_folder(self.path))
            first_rank = lock_folder(self.path, "rank0.lock")
            if writes:
                locks.enter_context(first_rank)
            else:
                with first_rank:
                    pass  # no rank of an earlier run is left; those of this one will want it
            yield

    def fault_of(self, attempt: int) -> Path:
        """Return the file in which ranks write why attempt number ``attempt``, from 1, fails. Ranks of the attempt
        before may still be writing theirs."""
        return self.path / ("fault.txt" if attempt == 1 else f"fault-{attempt}.txt")

    def open(self, config: RunConfig, *, again: bool = False) -> None:
        """Make the folder for a new run, or check that it can be resumed with ``config``. Of an earlier start without a
        checkpoint, a split by other settings is removed.

        Args:
            again: this is a further attempt of the start that opened it; what that wrote stays.

        Raises:
            ValueError: it holds a checkpoint and ``--resume`` was not given, or other settings were used for it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for name in () if again else ("fault*.txt", "fault*.deaths"):  # of starts before this one
            for path in self.path.glob(name):
                path.unlink()
        if self.last.exists():
            if not config.resume:
                raise ValueError(f"{self.path} already holds a run: continue it with --resume, or name another --out")
            self._check_settings(flat(config))
            return
        earlier, split = self.settings(again=True), flat(config.split) | {"seed": config.seed}
        if any(earlier.get(name, value) != value for name, value in split.items()):
            self.splits.unlink(missing_ok=True)
        self.keep_settings(config)

    def keep_settings(self, config: RunConfig) -> None:
        """Write the settings that repeat the run; of a resumed start, once it has come to a checkpoint."""
        self._write_settings(flat(dataclasses.replace(config, resume=False, extend=False)))

    def attempts(self) -> Attempts:
        """Return the record of earlier attempts; an empty one of a new folder.

        Raises:
            ValueError: the file is damaged.
        """
        if not self._attempts.exists():
            return Attempts(0, (), None)
        try:
            return Attempts.from_json(read_data(self._attempts))
        except (KeyError, TypeError) as fault:
            raise ValueError(f"{self._attempts} is no record of attempts ({fault!r}); remove it") from fault

    def keep_attempts(self, attempts: Attempts) -> None:
        self.write_json(self._attempts.name, dataclasses.asdict(attempts))

    def keep_microbatches(self, m: int) -> None:
        """Remember a number of microbatches that was planned, not asked for: a resumed run continues with it."""
        self._write_settings(read_data(self.config) | {"microbatches": m})

    def _write_settings(self, settings: Mapping[str, Any]) -> None:
        with names_file(self.config):
            write_text(self.config, yaml.safe_dump(dict(settings), sort_keys=False))

    def settings(self, *, again: bool = False) -> dict[str, Any]:
        """Return the settings that the run in the folder was begun with, by flag; empty when there is none.

        Args:
            again: without a checkpoint, too: of an attempt that came to none.
        """
        begun = self.last.exists() or (again and self.config.exists())
        return read_data(self.config) if begun else {}

    def tells_end(self, step: int) -> bool:
        """Return whether the summary is there and is of a run that was completed with ``step`` steps.

        Raises:
            ValueError: the file is damaged.
        """
        if not self.summary.exists():
            return False
        found = read_data(self.summary)
        return (found.get("status"), found.get("steps")) == ("completed", step)

    def _check_settings(self, asked: Mapping[str, Any]) -> None:
        # A run begun before a setting existed has computed with its default.
        found = flat(RunConfig(DataSettings(Path()))) | self.settings()
        scored = {"positive_class"} if found["slide_score"] != "mean" else set()  # it chooses the best checkpoint
        files = [Path(each["weights"]).name if each["weights"] else None for each in (found, asked)]
        moved = {"weights"} if files[0] == files[1] else set()
        others = differing(found, asked, "the run has", {*FREE_TO_CHANGE, *LENGTH, *moved} - scored)
        (unit, begun), (other_unit, now) = _length(found), _length(asked)
        if (unit, begun) != (other_unit, now):
            line = f"{other_unit}: the run ends after {begun:g} {unit}, asked is {now:g} {other_unit}"
            if not asked["extend"]:
                others.append(f"{line}; its learning rate follows its end: add --extend to train for longer")
            elif unit == other_unit and now < begun:
                others.append(f"{line}; --extend makes a run longer, not shorter")
        if others:
            raise ValueError(
                f"{self.path} cannot be resumed with other settings; use the same, or another --out:\n       "
                + "\n       ".join(others)
            )

    def log_to_file(self) -> None:
        """Send everything logged to ``run.log``, and warnings to the user too."""
        log_to(self.path / "run.log")
        shown = logging.StreamHandler()
        shown.setLevel(logging.WARNING)
        shown.setFormatter(logging.Formatter("warning: %(message)s"))
        logging.getLogger().addHandler(shown)

    def write_json(self, name: str, value: Any) -> None:
        """Write ``value`` atomically; a reader never sees half a file."""
        with names_file(self.path / name):
            write_json(self.path / name, value)


def _length(settings: Mapping[str, Any]) -> tuple[str, float]:
    """Unit and number of what a run ends after."""
    if settings["steps"] is not None:
        return "steps", settings["steps"]
    return "epochs", EPOCHS if settings["epochs"] is None else settings["epochs"]


class CsvLog:
    """A CSV file that grows by a row at a time and can be cut back to where a checkpoint was taken.

    Args:
        path: the file; a header is written when it is new.
        columns: names, in order; the first is the step.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        self._columns = list(columns)
        if not path.exists():
            self._rewrite([])

    def rows(self) -> list[list[str]]:
        """Return the rows below the header."""
        with self._path.open(newline="") as file:
            return list(csv.reader(file))[1:]

    def cut_after(self, step: int) -> int:
        """Drop the rows of steps after ``step``: a resumed run computes them again. Their number."""
        # A row cut short by a crash has too few cells and no step to trust.
        whole = [row for row in self.rows() if len(row) == len(self._columns)]
        kept = [row for row in whole if int(row[0]) <= step]
        self._rewrite(kept)
        return len(whole) - len(kept)

    def add(self, row: Mapping[str, float | int | None]) -> None:
        """Append one row; None is an empty cell."""
        with names_file(self._path), self._path.open("a", newline="") as file:
            write_rows(file, [[row.get(name) for name in self._columns]])

    def _rewrite(self, rows: list[list[str]]) -> None:
        text = io.StringIO(newline="")
        write_rows(text, [self._columns, *rows])
        with names_file(self._path):
            write_text(self._path, text.getvalue())
