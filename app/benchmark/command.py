"""Flags of ``python -m app.bench``, their errors, and the runs that they ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from app.benchmark.case import Case, StrategySpec, cases_of
from app.settings.fields import bytes_of
from app.settings.launcher import find_launch
from app.settings.run import DataSettings, ModelSettings
from pipelines.slides.rare import Rare

STRATEGIES = (
    "single",
    "single+recompute",
    "ddp",
    "ddp+recompute",
    "fsdp",
    "spatial",
    "gpipe",
    "1f1b",
    "master",
    "master+recompute",
    "bidirectional",
)
WARM_UP = 2
"""Steps of a run that its figures leave out (``app.training.outcome``)."""


@dataclass(frozen=True)
class BenchCommand:
    """Measure strategies beside data-parallel baselines, on the same tiles of the same slides: a table, bench.json and
    report.html."""

    data: DataSettings
    net: ModelSettings = field(default_factory=ModelSettings)
    tiles: tuple[int, ...] = (512, 1024)
    """Tile sides in px, one after the other."""
    mpp: float = 0.5
    """Resolution of the tiles, um/px."""
    min_tissue: float = 0.25
    """Least part of a tile that is tissue, 0 to 1."""
    ranks: tuple[int, ...] = (1, 2)
    """Numbers of processes on this machine, which share its cores or have a GPU each."""
    stages: tuple[int, ...] = ()
    """Numbers of ranks, or of teams, that a copy of the model is split over; where that is a part of them, they make as
    many data-parallel groups. A number of ranks that it does not divide goes without. Default: all ranks."""
    strategies: tuple[str, ...] = STRATEGIES
    """Strategies of app.train, with +recompute (block by block) and +offload where wanted; single runs on one rank,
    the others on several. An @ gives the --grid of teams: spatial@2x2 and 1f1b@2x1 divide each tile, on those of
    --ranks that such teams make groups of; spatial alone cuts a strip for each rank. ddp is what the others are held
    against."""
    batch: int = 8
    """Tiles of one optimiser step, over all ranks."""
    microbatches: int | None = None
    """Parts the global batch is computed in, over all ranks, the same for every strategy; default: two for each of the
    most ranks, if there are as many tiles."""
    scaling: Literal["strong", "weak"] = "strong"
    """With several --ranks. strong: the same batch on all of them; weak: --batch is that of the fewest, and it grows
    with the ranks."""
    memory: str | None = None
    """Memory of each rank's device, such as 2GiB. A strategy that takes more is out of memory, on a CPU, too, where its
    tensors are counted. Default: what there is."""
    steps: int = 5
    """Optimiser steps of a run; the first two are a warm-up and are not counted."""
    twin_steps: Rare[int] = 3
    """Steps that are then measured from memory, to tell reading from computing; 0: none."""
    repeats: int = 3
    """Runs of each case; all cases are run once before any is run again."""
    optimizer: Literal["sgd", "adamw"] = "adamw"
    """Update rule."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto takes a GPU when there is one."""
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    """As for app.train. bf16: mixed precision; tf32: float32 with products of 10-bit mantissas; auto: bf16 on GPUs that
    compute in it, fp32 elsewhere."""
    trial_timeout_s: Rare[float] = 3600.0
    """Seconds after which a run is ended and counts as failed."""
    seed: int = 0
    """Of weights, order and augmentation."""
    resume: bool = False
    """Go on with the benchmark in --out: runs that are done are kept. More tiles, ranks, strategies and repeats may be
    asked for."""
    out: Path = Path("runs/bench")
    """Folder for bench.json, report.html, and the runs."""

    @property
    def m(self) -> int:
        """Microbatches of a step on the fewest ranks."""
        return self.microbatches or max(1, min(self.batch, 2 * max(self.ranks)))

    def cases(self) -> list[Case]:
        """All that is to be measured, in order."""
        return list(
            cases_of(
                self.strategies,
                self.tiles,
                self.ranks,
                self.stages,
                batch=self.batch,
                microbatches=self.m,
                scaling=self.scaling,
                memory=self.memory,
            )
        )

    def validate(self) -> list[str]:
        faults = self.data.validate()
        for name in ("tiles", "ranks", "strategies", "stages"):
            values = getattr(self, name)
            if (not values and name != "stages") or len(set(values)) < len(values):
                faults.append(f"--{name} takes one or more, each once; got {' '.join(map(str, values)) or 'none'}")
        faults += [
            f"--{name} must be at least {least}; got {value}"
            for name, least in (("batch", 1), ("steps", WARM_UP + 1), ("repeats", 1))
            if (value := getattr(self, name)) < least
        ]
        faults += [
            f"--{name} must be at least 1; got {value}"
            for name in ("tiles", "ranks")
            for value in getattr(self, name)
            if value < 1
        ]
        faults += [
            f"--stages takes numbers of 2 or more that divide one of --ranks {' '.join(map(str, self.ranks))}; "
            f"got {depth}"
            for depth in self.stages
            if depth < 2 or all(ranks % depth for ranks in self.ranks)
        ]
        if self.microbatches is not None and not 1 <= self.microbatches <= self.batch:
            faults.append(f"--microbatches must be 1 to --batch {self.batch}; got {self.microbatches}")
        if self.memory is not None and bytes_of(self.memory) is None:
            faults.append(f"--memory takes a size such as 512MiB or 16GiB; got {self.memory!r}")
        if self.twin_steps < 0:
            faults.append(f"--twin-steps must be at least 0; got {self.twin_steps}")
        if not self.trial_timeout_s > 0:
            faults.append(f"--trial-timeout-s must be above 0; got {self.trial_timeout_s:g}")
        for strategy in self.strategies:
            try:
                fault = StrategySpec.parse(strategy).fault(self.ranks)
            except ValueError as unread:
                fault = str(unread)
            faults += [fault] if fault else []
        if find_launch() is not None:
            faults.append(
                "app.bench starts the ranks of its runs itself: start it once, without torchrun, mpirun or srun"
            )
        if not faults and not self.cases():
            faults.append(
                f"nothing to measure: single runs on one rank, everything else on several; got --ranks "
                f"{' '.join(map(str, self.ranks))} and --strategies {' '.join(self.strategies)}"
            )
        return faults
