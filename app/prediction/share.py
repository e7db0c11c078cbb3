"""The slides that one rank, or a group of ranks together, predicts: window by window, or each as one image.

Takes the command and the number of this rank; writes the files of its slides, and its log. A slide that fails is
recorded and the next is predicted. A model of ``--tile slide`` takes the rectangle of the index around the tissue, its
sides multiples of the run's ``--stride``, and gives one score for each class.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from app.launch.host import stop_with_launcher
from app.launch.place import choose_device, connect, host_memory, take_cores
from app.pages.pictures import as_png
from app.prediction.command import PredictCommand
from app.prediction.computation import Placement, rank_faults
from app.prediction.prediction_folder import TRAINING_PATIENTS, PredictionFolder
from app.prediction.slide_files import slide_row, write_tiles
from app.prediction.trained_model import TrainedModel
from app.prediction.whole_slide import predict_slide
from app.settings.cli import RunError
from app.settings.launcher import find_launch, started_by_us
from app.settings.strategy import StrategySettings
from app.training.progress import log_to, say
from app.training.run_slides import opening, predicted_slides
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import LocalCommunicator
from parallel.profile.gpu import is_device_fault, lacks_memory
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.processes import map_isolated
from pipelines.catalog.table import counted
from pipelines.slides.geometry import Region, l0_from_l, l0_step
from pipelines.slides.slide import SlideError
from pipelines.stream.read import centre
from pipelines.tiles.slide_index import SlideResult, SlideTiles, default_threads, find_tiles, index_slide, slide_limits
from pipelines.tiles.stain import StainFit, stain_of
from pipelines.tiles.tile_table import IndexedSlide
from pipelines.tiles.windows import WindowSettings

log = logging.getLogger("app.predict")
_say = functools.partial(say, logger=log)
CELLS = 8
"""Px of a classifier's heat map along a tile's side at most: tiles overlap by whole px of it."""
ANY_TISSUE = 1e-6
"""Least tissue of a segmenter's windows: its borders are looked at, too."""
OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Faults that the next slide would meet as well."""


class _Image(NamedTuple):
    """A slide as one image.

    Attributes:
        pixels: (h, w, 3), where the computation reads.
        size: height and width.
        place: l0_x, l0_y, l0_width, l0_height of the image.
        tissue: the part of it that is tissue.
        drawn: PNG for ``overlays/``.
        stain: of the slide, or why it has none; None: its colours are left as they are.
    """

    source: IndexedSlide
    pixels: NDArray[np.uint8] | None
    size: tuple[int, int]
    place: tuple[int, int, int, int]
    tissue: float
    drawn: bytes
    stain: StainFit | str | None


def predict_image(spec: SlideSpec, model: TrainedModel, folder: PredictionFolder) -> dict[str, Any] | None:
    """Predict a slide that is one image; return its row of ``slides.csv``, on the rank of its group that has the
    model's outputs.

    Raises:
        SlideError: the slide cannot be used; on every rank of the group.
        RunError: one of several ranks of the group has failed.
    """
    with model.computation.fail_together():
        image = (_picture if model.config.index.whole_pictures else _rectangle)(spec, model)
    with rank_faults(spec.slide_id, model.computation):
        fit = image.stain if isinstance(image.stain, StainFit) else None
        images = None if image.pixels is None else image.pixels[None]
        values = model.probabilities(images, (1, 3, *image.size), fit)
    if values is None:
        return None
    slide_id, source = spec.slide_id, image.source
    folder.file("overlays", slide_id).write_bytes(image.drawn)
    if isinstance(image.stain, str):
        folder.failed.add(slide_id, "stain", f"its colours are left as they are: {image.stain}")
    scores = values.astype(float)
    path, tissue = folder.file("tiles", slide_id), np.array([image.tissue])
    write_tiles(path, model.classes, [image.place], tissue, scores, scores.max(1))
    assert source.state is not None
    row = slide_row(model, slide_id, source.state, 1, 0, scores[0])
    canvas = {"path": str(spec.path), "mpp": source.mpp, "l0_size": [source.width, source.height]}
    folder.finish(row, source.state, canvas, opening(spec))
    return row


def _picture(spec: SlideSpec, model: TrainedModel) -> _Image:
    settings, threads = model.config.index, default_threads(1)
    stain: StainFit | str | None = None
    source = find_tiles(spec, settings, threads).source
    if model.stain_target is not None:
        measured = stain_of(spec, model.stain_target.method, settings.tissue_mpp, threads)
        stain = measured if isinstance(measured, StainFit) else str(measured)
    with spec.open() as slide:
        level = slide.levels[0]
        picture = slide.read(Region(0, 0, level.width, level.height, level.mpp))
    pixels = np.array(centre(picture, settings.side))  # torch wants memory that may be written to
    read, place = pixels if model.computation.reads else None, (0, 0, source.width, source.height)
    return _Image(source, read, (settings.side, settings.side), place, 1.0, as_png(pixels), stain)


def _rectangle(spec: SlideSpec, model: TrainedModel) -> _Image:
    """Return the rectangle of a slide that the index puts around its tissue."""
    settings, threads = model.config.index, default_threads(1)
    stain: StainFit | str | None = None
    find = functools.partial(index_slide, settings=settings, threads=threads)
    ((_, result),) = map_isolated(find, [spec], 1, slide_limits(threads))
    if not isinstance(result, SlideResult):
        raise SlideError(f"{spec.path}: {result}")
    tiles = result.found
    if not isinstance(tiles, SlideTiles):
        raise SlideError(f"{tiles.step}: {tiles.error}")
    if model.stain_target is not None:
        method = model.stain_target.method
        fit = functools.partial(stain_of, method=method, tissue_mpp=settings.tissue_mpp, threads=threads)
        ((_, measured),) = map_isolated(fit, [spec], 1, slide_limits(threads))
        stain = measured if isinstance(measured, StainFit) else str(measured)
    region = Region(int(tiles.l0_x[0]), int(tiles.l0_y[0]), *tiles.size, settings.mpp)
    with spec.open() as slide:
        pixels = slide.read(region) if model.computation.reads else None
        sides = ((side, l0_step(slide.levels, side, settings.mpp)) for side in tiles.size)
        l0_width, l0_height = (l0_from_l(side, step) for side, step in sides)
    place = region.l0_x, region.l0_y, l0_width, l0_height
    drawn = result.overlay_png or b""
    return _Image(tiles.source, pixels, tiles.size[::-1], place, float(tiles.tissue[0]), drawn, stain)


def predict_rank(command: PredictCommand, rank: int) -> None:
    """Predict the slides of this rank's group: of d groups every d-th."""
    device = choose_device(command.device)
    take_cores(device)
    command.out.mkdir(parents=True, exist_ok=True)
    with _device_faults(command, "loading the model", 1):
        model = TrainedModel(command.checkpoint, command.model, device, _spread(command, rank, device), command.batch)
    writes, (group, groups) = model.computation.writes, (rank // command.stages, command.world // command.stages)
    predict, what = _predictor(model, command)
    index = model.config.index
    of_run = {name: value for name in vars(model.config.data) if (value := vars(command).get(name)) is not None}
    specs = predicted_slides(model.config.data, index, model.slides, of_run)
    folder = PredictionFolder(command.out)
    folder.open(
        {
            "checkpoint": model.digest,
            "model": model.name,
            "step": model.step,
            "task": model.task,
            "classes": list(model.classes),
            "class_map": list(model.config.data.class_map),
            "shown": list(model.shown.values()),
            "positive_class": None if model.positive is None else model.classes[model.positive],
            "tile": index.tile,
            "whole_pictures": index.whole_pictures,
            "mpp": index.mpp,
            "overlap": command.overlap,
            TRAINING_PATIENTS: model.training_patients,
        }
    )
    log_to(command.out / (f"run-{rank}.log" if command.world > 1 else "run.log"))
    share = specs[group::groups]
    done = folder.done(share)
    undone = model.computation.broadcast([spec.slide_id for spec in share if spec.slide_id not in done])
    todo = [spec for spec in share if spec.slide_id in undone]
    if not rank:
        weights = ", averaged weights" * model.averaged
        slides = counted(len(specs), "slide")
        _say(f"{slides} in {command.slides}, {model.task}: {', '.join(model.classes)}; {what}{weights}")
    if writes and len(share) > len(todo):
        _say(f"done in {command.out} already: {counted(len(share) - len(todo), 'slide')}")
    if writes:
        folder.forget([spec.slide_id for spec in todo])
    failed = []
    for number, spec in enumerate(todo, 1):
        started_s = time.perf_counter()
        try:
            with _device_faults(command, spec.slide_id, 1 if index.one_tile_each else command.batch):
                row = predict(spec, folder)
        except Exception as fault:
            if isinstance(fault, RunError) or (isinstance(fault, OSError) and fault.errno in OF_THE_DISK):
                raise
            if not isinstance(fault, SlideError | ValueError):
                log.exception("%s", spec.slide_id)
            failed.append(spec.slide_id)
            reason = str(fault) if isinstance(fault, SlideError | ValueError) else f"{type(fault).__name__}: {fault}"
            said = f"failed: {reason.splitlines()[0]}"
            if writes:
                folder.failed.add(spec.slide_id, "predict", reason)
        else:
            if row is None:
                continue
            scores = ", ".join(f"{name} {row[f'score_{name}']:.3f}" for name in model.classes)
            said = f"{counted(row['tiles'], 'window')}, {scores}, {time.perf_counter() - started_s:.1f} s"
        if writes:
            _say(f"{number}/{len(todo)}  {spec.slide_id}: {said}")
    if writes:
        folder.write_table()
    # The last rank to end finds that all have failed; one that failed earlier would end the others with it.
    if (
        writes
        and not folder.rows()
        and {spec.slide_id for spec in specs} <= {slide for slide, *_ in folder.failed.rows()}
    ):
        raise RunError(f"none of {counted(len(specs), 'slide')} could be predicted; {folder.failed.path} says why")
    if rank == command.stages - 1:  # of the first group, who writes
        _say_predictions(model, folder, " so far" * (groups > 1))
    if failed and writes:
        _say(f"failed       {folder.failed.path} ({counted(len(failed), 'slide')})")


def _say_predictions(model: TrainedModel, folder: PredictionFolder, so_far: str) -> None:
    """Print how many slides are predicted, and how many are in a split of the run by their patient's name alone."""
    records = folder.records()
    _say(f"predictions  {folder.path} ({counted(len(records), 'slide')}{so_far})")
    if splits := model.splits_by_patient(records):
        each = ", ".join(f"{split} {count}" for split, count in sorted(splits.items()))
        _say(
            f"by patient   {counted(splits.total(), 'slide')} not of the run, in the split of a patient of the same "
            f"name: {each}; if these are other patients, use app.evaluate --split all"
        )


def _predictor(
    model: TrainedModel, command: PredictCommand
) -> tuple[Callable[[SlideSpec, PredictionFolder], dict[str, Any] | None], str]:
    """Return the function that predicts a slide, and words for what it looks at."""
    index = model.config.index
    if index.whole_pictures:
        return lambda spec, folder: predict_image(spec, model, folder), f"pictures as one image of {model.tile} px"
    if index.tile == "slide":
        return lambda spec, folder: predict_image(spec, model, folder), f"slides as one image at {index.mpp:g} um/px"
    divisors = (count for count in range(CELLS, 0, -1) if model.tile % count == 0)
    cells = model.tile if model.task == "segment" else next(divisors)
    cell = model.tile // cells
    stride = max(1, round(cells * (1 - command.overlap)))
    least = index.min_tissue if model.task == "classify" else min(index.min_tissue, ANY_TISSUE)
    method = model.stain_target.method if model.stain_target else None
    windows = WindowSettings(model.tile, index.mpp, cell, stride, least, index.tissue_mpp, method)
    what = f"windows of {model.tile} px at {index.mpp:g} um/px every {stride * cell} px"
    if stride == cells and command.overlap:
        what += f"; --overlap {command.overlap:g} has no effect, as they move by whole cells of the heat map"
    return lambda spec, folder: predict_slide(spec, model, windows, command.batch, folder), what


def _spread(command: PredictCommand, rank: int, device: torch.device) -> Placement:
    """Return the placement of the model on this rank; every rank calls it."""
    communicator: Communicator = LocalCommunicator()
    if command.stages > 1:
        ranks = connect(StrategySettings(ranks=command.world, join_timeout_s=command.join_timeout_s), device)
        groups = [range(first, first + command.stages) for first in range(0, command.world, command.stages)]
        # All ranks make the links of all groups. Which of them a group uses is known once the model is cut.
        ranks.connect([pair for members in groups for pair in itertools.permutations(members, 2)])
        for members in groups:
            group = ranks.subgroup(members)
            communicator = communicator if group is None else group
    else:
        stop_with_launcher()
    stream = None if command.stream == "none" else int(command.stream)
    host = None if stream is None else host_memory(device, command.out)
    return Placement(communicator, stream, command.offload == "parameters", host)


@contextlib.contextmanager
def _device_faults(command: PredictCommand, where: str, batch: int) -> Iterator[None]:
    """Report a fault of the device as one of the run, as the next slide would meet it too. ``batch``: images computed
    together."""
    try:
        yield
    except RuntimeError as fault:
        if not is_device_fault(fault):
            raise
        reason = str(fault).partition("\n")[0]
        advice = "this process cannot use the device any more: see `dmesg` and `python -m app.doctor`"
        if lacks_memory(fault):
            stages = 2 * command.stages
            split = f"--stages {stages}"
            if command.world % stages:  # a launcher has its own flag for the number of ranks
                by_launcher = find_launch() is not None and not started_by_us()
                split = f"{split} on {stages} ranks" if by_launcher else f"--ranks {stages} {split}"
            ways = {
                f"lower --batch (now {batch})": batch > 1,
                "compute in boxes (--stream 512)": command.stream == "none",
                "keep the weights in host memory (--offload parameters)": command.offload == "none",
                f"split the model ({split})": True,
            }
            advice = " or ".join(way for way, is_left in ways.items() if is_left)
        raise RunError(f"{where}: {reason}. Slides that are done are kept; {advice}, then start again") from fault
