"""``python -m app.predict``: heat maps, areas and scores of whole slides by a trained model.

Takes a folder of slides and a checkpoint of ``app.train``; leaves for each slide a heat map of each class (a pyramidal
TIFF), a picture, GeoJSON for QuPath and a table of tiles, and ``slides.csv`` of all. A slide that fails is named in
``failed_slides.csv``; another start goes on with the slides that are not done.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from app.launch.folder_lock import sole_user
from app.settings.cli import RunError, run_command
from app.settings.launcher import find_launch
from app.training.progress import LOG_FORMAT
from pipelines.catalog.catalog import find_slides
from pipelines.slides.geometry import MPP_MAX, MPP_MIN, check_mpp
from pipelines.slides.slide import SlideError

log = logging.getLogger("app.predict")

CELLS = 8
"""Px of a classifier's heat map along a tile's side at most: tiles overlap by whole px of it."""

ANY_TISSUE = 1e-6
"""Least tissue of a segmenter's windows: its borders are looked at, too."""

OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Faults that the next slide would meet as well."""


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
    """um/px of level 0 for every slide, instead of what the files say."""
    backend: Literal["auto", "tiled", "ndpi", "openslide", "zarr", "image"] = "auto"
    """Slide reader; auto takes the fastest that reads the file exactly."""
    ranks: int = 1
    """Processes that share the slides out among them. Under torchrun, mpirun or srun, those."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model computes; auto: on a GPU if there is one."""

    def validate(self) -> list[str]:
        rules = [
            (0 <= self.overlap <= 0.9, f"--overlap is a part of the window, 0 to 0.9; got {self.overlap:g}"),
            (self.batch >= 1, f"--batch is at least 1 window; got {self.batch}"),
            (self.ranks >= 1, f"--ranks is at least 1; got {self.ranks}"),
            (
                self.slide_mpp is None or check_mpp(self.slide_mpp),
                f"--slide-mpp is {MPP_MIN:g} to {MPP_MAX:g} um/px; got {self.slide_mpp}",
            ),
        ]
        return [fault for holds, fault in rules if not holds]


def predict(command: PredictCommand, arguments: Sequence[str]) -> int:
    """Predict as ``command`` says; ``arguments`` are what further ranks are started with."""
    launch = find_launch()
    if command.ranks > 1 and launch is None:
        from app.launch.place import start_ranks  # torch is imported once the settings are known to be right

        with sole_user(command.out):
            code = start_ranks(command.ranks, "app.predict", arguments)
        if code:
            raise RunError(f"a rank ended with exit code {code}; its message stands above")
        return 0
    with contextlib.ExitStack() as held:
        if launch is None:
            held.enter_context(sole_user(command.out))
        return _predict_share(command, launch.rank if launch else 0, launch.world if launch else 1)


def _predict_share(command: PredictCommand, rank: int, world: int) -> int:
    """Predict every ``world``-th slide from number ``rank``."""
    from app.launch.place import choose_device, take_cores
    from app.prediction.prediction_folder import PredictionFolder
    from app.prediction.trained_model import load_model
    from app.prediction.whole_slide import predict_slide
    from pipelines.tiles.windows import WindowSettings

    launch = find_launch()
    device = choose_device(command.device, launch.local_rank if launch else 0)
    take_cores(device)
    model = load_model(command.checkpoint, command.model, device)
    asked = model.settings
    cell = 1 if model.task == "segment" else model.tile // math.gcd(model.tile, CELLS)
    cells = model.tile // cell
    stride = max(1, round(cells * (1 - command.overlap)))
    least = asked["min_tissue"] if model.task == "classify" else min(asked["min_tissue"], ANY_TISSUE)
    method = model.stain_target.method if model.stain_target else None
    windows = WindowSettings(model.tile, asked["mpp"], cell, stride, least, asked["tissue_mpp"], method)
    specs = find_slides(command.slides, mpp=command.slide_mpp, picture_mpp=asked["mpp"], backend=command.backend)
    folder = PredictionFolder(command.out)
    folder.open(
        {
            "checkpoint": model.digest,
            "model": model.name,
            "step": model.step,
            "task": model.task,
            "classes": list(model.classes),
            "shown": list(model.shown.values()),
            "tile": model.tile,
            "mpp": asked["mpp"],
            "overlap": command.overlap,
            "slide_mpp": command.slide_mpp,
        }
    )
    _log_to(command.out / (f"run-{rank}.log" if world > 1 else "run.log"))
    todo = [spec for spec in specs[rank::world] if not folder.is_done(spec.slide_id, spec.path)]
    if not rank:
        _say(
            f"{len(specs)} slides in {command.slides}, {model.task}: {', '.join(model.classes)}; windows of "
            f"{model.tile} px at {asked['mpp']:g} um/px every {stride * cell} px"
        )
    if kept := len(specs[rank::world]) - len(todo):
        _say(f"{kept} slides are done in {command.out} already")
    folder.failed.forget([spec.slide_id for spec in todo])
    failed = []
    for number, spec in enumerate(todo, 1):
        started_s = time.perf_counter()
        try:
            row = predict_slide(spec, model, windows, command.batch, folder)
        except Exception as fault:
            if isinstance(fault, OSError) and fault.errno in OF_THE_DISK:
                raise
            if not isinstance(fault, SlideError | ValueError):
                log.exception("%s", spec.slide_id)
            failed.append(spec.slide_id)
            reason = str(fault) if isinstance(fault, SlideError | ValueError) else f"{type(fault).__name__}: {fault}"
            folder.failed.add(spec.slide_id, "predict", reason)
            what = f"failed: {reason.splitlines()[0]}"
        else:
            scores = ", ".join(f"{name} {row[f'score_{name}']:.3f}" for name in model.classes)
            what = f"{row['tiles']} windows, {scores}, {time.perf_counter() - started_s:.1f} s"
        _say(f"{number}/{len(todo)}  {spec.slide_id}: {what}")
    folder.write_table()
    if todo and len(failed) == len(todo) and not folder.rows():
        raise RunError(f"none of the {len(todo)} slides could be predicted; {folder.failed.path} says why")
    if not rank:
        _say(f"predictions  {command.out} ({len(folder.rows())} slides)")
    if failed:
        _say(f"failed       {folder.failed.path} ({len(failed)} slides)")
    return 0


def _log_to(path: Path) -> None:
    handler = logging.FileHandler(path, errors="backslashreplace")
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def _say(line: str) -> None:
    print(line, flush=True)
    log.info(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: predicted, also where single slides failed; 1: failed; 2: wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    return run_command(PredictCommand, lambda command: predict(command, arguments), arguments, "python -m app.predict")


if __name__ == "__main__":
    sys.exit(main())
