"""A whole benchmark: tiles found once, every case run round robin, and results kept after each run.

Takes the command; leaves ``trials/`` with the files of each run, ``bench.json`` and ``report.html`` in its folder, and
prints a line for each run and the table at the end.
"""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from app.benchmark.command import BenchCommand, Case
from app.benchmark.page import NAME, print_bench, write_page
from app.benchmark.row import Row, Trial, compare, row_of, run_trial
from app.pages.html import format_duration
from app.settings.cli import FAILED, OK
from app.settings.fields import arguments_for, differing, flat, read_data, write_json
from app.settings.run import RunConfig, SplitSettings
from app.training.dataset import prepare
from app.training.run_folder import RunFolder
from app.training.run_info import describe_environment
from pipelines.slides.slide import SlideError
from pipelines.tiles.tiling import IndexSettings

MAY_GROW = (
    *("tiles", "ranks", "stages", "strategies", "microbatches", "repeats", "resume", "out"),
    *("trial_timeout_s", "index_workers"),
)
"""Settings that may differ when a benchmark is gone on with: they add runs, and change none that was made. Of
``microbatches`` the number ``m`` that it stands for has to be the same."""
ALL = SplitSettings(validation=0.0, test=0.0)
"""Every slide is trained on: a benchmark scores nothing."""
NEVER = 10**9
"""Steps between checkpoints of runs that write none but the last."""
KEPT = ("ok", "out-of-memory")
"""Results that ``--resume`` keeps: the causes of others may be gone."""


class BenchmarkRunner:
    """The runs of one ``app.bench``.

    Raises:
        ValueError: the folder holds a benchmark and ``--resume`` was not given, or one with other settings or of
            another machine.
    """

    def __init__(self, command: BenchCommand, arguments: Sequence[str]) -> None:
        self._command, self._arguments, self._folder = command, arguments, command.out
        self._trials = command.out / "trials"
        self._cases = command.cases()
        self._unusable: dict[int, str] = {}
        self._environment = describe_environment()
        self._open()

    def run(self) -> int:
        """Measure; exit code 0 when any case ran. Asked to end, it ends the run under way first."""
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        for tile in self._command.tiles:
            self._prepare(tile)
        for repeat in range(self._command.repeats):
            for number, case in enumerate(self._cases, 1):
                if self._done(case, repeat):
                    continue
                told = f"run {repeat + 1} of {self._command.repeats}, case {number} of {len(self._cases)}"
                trial = self._measure(case, repeat)
                print(f"{told}: {case.tile} px, {case.ranks}x {case.label}: {_outcome(trial)}", flush=True)
                self._write()
        rows = self._write()
        print_bench(rows)
        wall_s = sum(row["wall_s"] for row in rows)
        print(f"\n{len(self._cases)} cases in {format_duration(wall_s)}; report {write_page(self._folder)}")
        return OK if any(trial.status == "ok" for case in self._cases for trial in self._results(case)) else FAILED

    def _open(self) -> None:
        path = self._folder / "settings.yaml"
        asked = flat(self._command)
        if path.exists():
            if not self._command.resume:
                raise ValueError(
                    f"{self._folder} already holds a benchmark: go on with --resume, or name another --out"
                )
            kept = read_data(path)
            others = differing(kept, asked, "the benchmark has", MAY_GROW)
            # The default follows from the number of ranks, which may grow.
            if (m := kept.get("m")) != self._command.m:
                others.append(
                    f"microbatches: the benchmark has {m}, asked is {self._command.m}: add --microbatches {m}"
                )
            fewest = min(kept["ranks"]), min(self._command.ranks)
            if self._command.scaling == "weak" and fewest[0] != fewest[1]:
                others.append("ranks: --batch is that of the fewest, {} in the benchmark; asked are {}".format(*fewest))
            if (found := self._folder / NAME).exists():
                before, here = _hardware(read_data(found)["environment"]), _hardware(self._environment)
                if before != here:
                    others.append(f"machine: the benchmark has {before}; this is {here}: name another --out")
            if others:
                lines = "\n       ".join(others)
                raise ValueError(f"{self._folder} holds another benchmark:\n       {lines}")
        self._trials.mkdir(parents=True, exist_ok=True)
        for result in self._trials.glob("*/*/trial.json"):
            if Trial.load(result).status not in KEPT:
                result.unlink()
        path.write_text(yaml.safe_dump({**asked, "m": self._command.m}, sort_keys=False))

    def _prepare(self, tile: int) -> None:
        """Find the tiles of this size and divide them, once for all cases."""
        command = self._command
        index = IndexSettings(tile=tile, mpp=command.mpp, min_tissue=command.min_tissue)
        folder = self._prepared(tile)
        folder.mkdir(parents=True, exist_ok=True)
        config = RunConfig(command.data, index, ALL, out=folder, seed=command.seed)
        try:
            dataset = prepare(config, RunFolder(folder), lambda line: None)
        except (ValueError, SlideError) as fault:
            self._unusable[tile] = str(fault)
            print(f"{tile} px: {fault}", flush=True)
        else:
            print(f"{tile} px: {len(dataset.rows('train'))} training tiles of {len(dataset.specs)} slides", flush=True)

    def _measure(self, case: Case, repeat: int) -> Trial:
        folder = self._path(case, repeat)
        refusal = self._unusable.get(case.tile) or case.refusal
        if refusal:
            trial = Trial("cannot", refusal)
            folder.mkdir(parents=True, exist_ok=True)
            trial.save(folder / "trial.json")
            return trial
        return run_trial(case, self._shared(), self._prepared(case.tile), folder, self._command.trial_timeout_s)

    def _done(self, case: Case, repeat: int) -> bool:
        """It was run, or an earlier repeat of it shows that it cannot be."""
        return (self._path(case, repeat) / "trial.json").exists() or any(
            trial.status != "ok" for trial in self._results(case)
        )

    def _results(self, case: Case) -> Iterator[Trial]:
        for repeat in range(self._command.repeats):
            path = self._path(case, repeat) / "trial.json"
            if path.exists():
                yield Trial.load(path)

    def _write(self) -> list[Row]:
        """``bench.json`` of all that has been measured so far."""
        command = self._command
        scaling = command.scaling if len(command.ranks) > 1 else None
        rows: list[Row] = []
        for case in self._cases:
            if trials := list(self._results(case)):
                row = row_of(case, command.net.model, trials, scaling)
                picture = self._path(case, 0) / "schedule.svg"
                row["schedule_svg"] = str(picture.relative_to(self._folder)) if picture.exists() else None
                rows.append(row)
        compare(rows)
        found = {
            "command": "python -m app.bench " + shlex.join(self._arguments),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "wall_s": sum(row["wall_s"] for row in rows),
            "environment": self._environment,
            "settings": flat(command) | {"microbatches": command.m},
            "rows": rows,
        }
        write_json(self._folder / NAME, found, nan=True)
        return rows

    def _shared(self) -> list[str]:
        """Arguments of ``app.train`` that every case has."""
        command = self._command
        names = ("mpp", "min_tissue", "optimizer", "device", "precision", "seed", "steps", "twin_steps")
        own = {name: getattr(command, name) for name in names}
        return arguments_for(flat(command.data) | flat(command.net) | own | {"checkpoint_every": NEVER} | flat(ALL))

    def _prepared(self, tile: int) -> Path:
        return self._folder / "tiles" / str(tile)

    def _path(self, case: Case, repeat: int) -> Path:
        return self._trials / case.name / str(repeat + 1)


def _hardware(environment: Mapping[str, Any]) -> str:
    """Return the names of the processor and of the GPUs, each kind once: the ranks may grow."""
    return ", ".join(dict.fromkeys([environment["cpu"]["model"], *(gpu["name"] for gpu in environment["gpus"])]))


def _outcome(trial: Trial) -> str:
    if trial.status != "ok":
        return f"{trial.status}: {trial.reason.splitlines()[0]}"
    return f"{trial.summary['images_per_second']:.3g} images/s ({trial.wall_s:.0f} s)"
