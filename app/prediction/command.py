"""Flags of ``app.predict`` and their errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.settings.fields import at_least, broken
from app.settings.launcher import find_launch
from app.settings.run import Backend, mpp_errors
from app.settings.strategy import JOIN_S
from pipelines import Rare


@dataclass(frozen=True)
class PredictCommand:
    """Predict whole slides with a trained model: heat maps, areas for QuPath, scores of tiles and slides."""

    slides: Path
    """Folder of whole-slide images, searched with its sub-folders."""
    checkpoint: Path
    """File of app.train, such as RUN/checkpoints/best.pt: model, classes, tile and mpp are those of its run."""
    out: Path = Path("predictions")
    """Folder for heat_maps/, overlays/, geojson/, tiles/, slides.csv and failed_slides.csv. Slides that are done there
    are kept."""
    overlap: float = 0.25
    """Part of a window's side that it shares with the next, 0 to 0.9."""
    batch: int = 4
    """Windows computed together."""
    model: str | None = None
    """Only where the checkpoint is of a package.module:factory, whose code is run: its name again."""
    slide_mpp: float | None = None
    """um/px of level 0 for every slide, instead of what the files say. Default: the run's."""
    mpp_table: Path | None = None
    """CSV with columns slide and mpp; goes before --slide-mpp. Default: column mpp of labels.csv in --slides."""
    scene: int | None = None
    """Image of slide files that hold several, counted from 0. Default: that of the run."""
    backend: Backend | None = None
    """Slide reader; auto takes the fastest that reads the file exactly. Default: that of the run."""
    ranks: int = 1
    """Processes that share the slides out among them. Under torchrun, mpirun or srun, those."""
    stages: int = 1
    """Ranks that a copy of the model is split over, as in training; groups of so many share the slides."""
    stream: str = "none"
    """Compute each window in boxes of this many px, such as 512, exactly, in less memory."""
    offload: Literal["none", "parameters"] = "none"
    """parameters: they lie in the host's memory, and come to the device layer by layer."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model computes; auto: on a GPU if there is one."""
    join_timeout_s: Rare[float] = JOIN_S
    """Seconds that ranks with --stages have to arrive, once the first is there, before the start is given up."""

    @property
    def world(self) -> int:
        """Ranks: those that a launcher started, else ``ranks``."""
        launch = find_launch()
        return launch.world if launch else self.ranks

    def validate(self) -> list[str]:
        rules = {
            f"--overlap is a part of the window, 0 to 0.9; got {self.overlap:g}": not 0 <= self.overlap <= 0.9,
            **at_least(self, batch=1, ranks=1),
            f"--join-timeout-s must be above 0 and finite; got {self.join_timeout_s:g}": not 0
            < self.join_timeout_s
            < math.inf,
            f"--stages divides the number of ranks; got {self.stages} of {self.world} ranks": self.stages < 1
            or self.world % self.stages,
            f"--stream takes none or the side of boxes in px, such as 512; got {self.stream!r}": self.stream != "none"
            and not (self.stream.isdecimal() and int(self.stream) >= 1),
        }
        return broken(rules) + mpp_errors(self.slide_mpp)
