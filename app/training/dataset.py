"""Dataset of a run: slides of a folder found, labelled, indexed as tiles and split by patient.

Takes the settings and the run folder; returns a ``Dataset``. What is made (tile index, split file, failed slides) lands
in the run folder and is reused by the next start, so that every rank that calls this sees the same tiles.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from app.launch.host import usable_cores
from app.settings.run import RunConfig, slides_in
from app.training.run_folder import RunFolder
from app.training.run_slides import choose_splits
from pipelines.cache.tile_cache import TileCache, open_cached
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.handles import SlidePool
from pipelines.catalog.table import FailedSlides, counted, listed
from pipelines.labels.annotations import SlideAnnotations
from pipelines.labels.class_names import NOTHING_COUNTS, ClassMap, TileLabel, positive_class
from pipelines.labels.slide_labels import SlideLabels, find_labels
from pipelines.labels.splits import Splits, split_folders
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from pipelines.tiles.index import SlideDone, build_index, with_index_state
from pipelines.tiles.stain import StainFit, fit_slides
from pipelines.tiles.tile_table import TileTable, sides_text

log = logging.getLogger(__name__)

LABEL_GRID = 64
"""A tile's class from annotations is decided on this many points along its longer side; that of any area drawn on it
on every pixel."""
WEIGHT_SAMPLE = 500
"""About as many tiles are looked at to count the pixels of each class; all, if these lack a class."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Slides, their truth, and the tiles of each split.

    Attributes:
        task: classify (one class per tile) or segment (one per pixel).
        classes: names, in the order of the model's outputs.
        tile_labels: int64 (n,), class of each tile when the task is classify, else None.
        slide_labels: class of each slide; empty when only tiles or pixels have one.
        stains: of each slide of ``tiles``, None where there is no fit; empty when they are not normalised.
        stain_target: what they are made to look like.
    """

    task: str
    classes: tuple[str, ...]
    specs: tuple[SlideSpec, ...]
    truth: SlideLabels | SlideAnnotations
    splits: Splits
    tiles: TileTable
    tile_labels: NDArray[np.int64] | None
    slide_labels: dict[str, int]
    stains: tuple[StainFit | None, ...] = ()
    stain_target: StainFit | None = None

    def rows(self, split: str) -> NDArray[np.int64]:
        """Rows of ``tiles`` that belong to ``split`` (train, val or test)."""
        slides = [k for k, slide_id in enumerate(self.tiles.slides) if self.splits.split[slide_id] == split]
        return np.flatnonzero(np.isin(self.tiles.slide, slides))

    def pool(self, capacity: int, cache: TileCache | None = None) -> SlidePool:
        """Return handles for these slides, at most ``capacity`` open; their tiles go through ``cache``."""
        return SlidePool(self.specs, capacity, None if cache is None else functools.partial(open_cached, cache=cache))


def prepare(config: RunConfig, folder: RunFolder, progress: Callable[[str | SlideDone], None]) -> Dataset:
    """Find, label, index and split the slides of ``config``.

    Args:
        folder: receives tile index, overlays, split file and the list of failed slides.
        progress: takes lines, and each slide that is indexed.

    Raises:
        ValueError: no slides, no labels, labels of one class, settings that do not fit the slides, or files in the run
            folder that were made with other settings.
        SlideError: not one slide can be used.
    """
    data = config.data
    specs = slides_in(data.slides, data, whole_pictures=config.index.whole_pictures, labels=data.labels)
    truth = find_labels(
        data.slides,
        specs,
        labels=data.labels,
        annotations=data.annotations,
        class_map=ClassMap.parse(data.class_map),
        patient_pattern=config.split.patient_pattern,
    )
    task = _task(config, truth)
    known = truth.label if isinstance(truth, SlideLabels) else truth.paths
    failed = FailedSlides(folder.failed_slides)
    if isinstance(truth, SlideAnnotations):
        for slide_id, fault in truth.failed.items():
            failed.add_once(slide_id, "annotation", fault)
    specs = tuple(spec for spec in specs if spec.slide_id in known)
    progress(f"{counted(len(specs), 'slide')}, {task}, labels from {truth.source}: {', '.join(truth.classes)}")
    resumed = config.resume and folder.last.exists()
    workers = config.data.index_workers or usable_cores()
    tiles = build_index(specs, config.index, folder.path, workers=workers, progress=progress, resumed=resumed)
    if tiles.sides is not None:
        progress(f"whole slides as tiles: {sides_text(tiles)} at {config.index.mpp:g} um/px")
    off = _off_slides(tiles, truth, failed) if isinstance(truth, SlideAnnotations) else set()
    usable = [slide_id for slide_id in tiles.slides if slide_id in known and slide_id not in off]
    tile_labels: NDArray[np.int64] | None = None
    tiles = tiles.of_slides(usable)
    if task == "classify" and isinstance(truth, SlideAnnotations):
        rule = TileLabel.parse(data.tile_label)
        points = max(tiles.largest) if rule.least == 0 else LABEL_GRID
        tiles, areas = _drawn_areas(tiles, truth, specs, failed, points)
        tiles, tile_labels = _labelled(tiles, rule.classes(areas), progress)
        usable = list(tiles.slides)
    specs = with_index_state([spec for spec in specs if spec.slide_id in set(usable)], tiles)
    slide_labels = {s: truth.label[s] for s in usable} if isinstance(truth, SlideLabels) else {}
    given = split_folders(data.slides, specs)
    splits = choose_splits(config, folder, truth, usable, slide_labels, given, progress)
    if isinstance(truth, SlideLabels):
        tile_labels = np.array([slide_labels[s] for s in tiles.slides], np.int64)[tiles.slide]
    positive_class(truth.classes, config.score.positive_class)  # a name that is no class is refused before training
    dataset = Dataset(task, tuple(truth.classes), specs, truth, splits, tiles, tile_labels, slide_labels)
    if config.colour.method:
        how = config.colour.method, config.index.tissue_mpp, folder.path
        fits = fit_slides(specs, *how, workers=workers, progress=progress, resumed=resumed)
        target = fits.target(config.colour.stain_target)
        of_slides = [fits.fits[slide_id] for slide_id in tiles.slides]
        stains = tuple(fit if isinstance(fit, StainFit) else None for fit in of_slides)
        dataset = replace(dataset, stains=stains, stain_target=target)
    _check_training_part(dataset)
    return dataset


def _off_slides(tiles: TileTable, truth: SlideAnnotations, failed: FailedSlides) -> set[str]:
    """Return the slides whose annotation lies completely outside of them, which are recorded; log partial ones."""
    off: set[str] = set()
    partly: list[str] = []
    for source in tiles.sources:
        try:
            if outside := truth.outside(source.slide_id, source.width, source.height):
                log.info("%s: %s", source.slide_id, outside)
                partly.append(f"{source.slide_id} ({outside})")
        except SlideError as fault:
            off.add(source.slide_id)
            if failed.add_once(source.slide_id, "annotation", fault):
                log.warning("%s is left out: %s", source.slide_id, fault)
    if partly:
        log.warning("%d slides have annotations outside of them: %s", len(partly), listed(partly))
    if off and off >= set(tiles.slides):
        raise SlideError(f"the annotations of all slides lie outside of them; {failed.path} says where")
    return off


def _task(config: RunConfig, truth: SlideLabels | SlideAnnotations) -> str:
    asked = config.data.task
    if config.index.whole_pictures and (isinstance(truth, SlideAnnotations) or asked == "segment"):
        raise ValueError(
            f"--pictures resize gives each picture one class; got --task {asked} with {truth.source}: leave it out to "
            "learn from what is drawn, on tiles"
        )
    if config.data.tile_label != "majority" and (isinstance(truth, SlideLabels) or asked != "classify"):
        raise ValueError(
            f"--tile-label {config.data.tile_label} is for --task classify with annotations; got --task {asked} with "
            f"{truth.source}: leave it out"
        )
    if asked == "segment" and isinstance(truth, SlideLabels):
        raise ValueError(
            f"--task segment needs annotations, and only slide labels were found ({truth.source}): "
            "give --annotations DIR, or leave out --task"
        )
    if asked == "auto":
        return "classify" if isinstance(truth, SlideLabels) else "segment"
    return asked


def _drawn_areas(
    tiles: TileTable, truth: SlideAnnotations, specs: tuple[SlideSpec, ...], failed: FailedSlides, points: int
) -> tuple[TileTable, NDArray[np.int64]]:
    """Return the tiles of slides whose annotation can be read, and the areas (n, C) of each class on them, in points of
    a grid. Record the other slides."""
    areas = np.zeros((len(tiles), len(truth.classes)), np.int64)
    lost: set[str] = set()
    with contextlib.closing(SlidePool(specs, 1)) as pool:
        for row in range(len(tiles)):
            slide_id = tiles.slide_id(row)
            if slide_id in lost:
                continue
            try:
                areas[row] = _class_areas(tiles, row, truth, pool, points)
            except SlideError as fault:
                lost.add(slide_id)
                if failed.add_once(slide_id, "annotation", fault):
                    log.warning("%s is left out: %s", slide_id, fault)
    if len(lost) == len(tiles.slides):
        raise SlideError(f"no annotation can be read; {failed.path} says why")
    kept = [slide_id for slide_id in tiles.slides if slide_id not in lost]
    return tiles.of_slides(kept), areas[[tiles.slide_id(row) not in lost for row in range(len(tiles))]]


def _labelled(
    tiles: TileTable, labels: NDArray[np.int64], progress: Callable[[str], None]
) -> tuple[TileTable, NDArray[np.int64]]:
    """Return the tiles that have a class, and their classes; report those that are ignored as a whole."""
    rows = np.flatnonzero(labels != NOTHING_COUNTS)
    if len(rows) == len(labels):
        return tiles, labels
    progress(f"left out: {counted(len(labels) - len(rows), 'tile')}, as all that is drawn there is to be ignored")
    kept = tiles.select(rows)
    return kept.of_slides([kept.slides[k] for k in np.unique(kept.slide)]), labels[rows]


def _class_areas(
    tiles: TileTable, row: int, truth: SlideAnnotations, pool: SlidePool, points: int = LABEL_GRID
) -> NDArray[np.int64]:
    """Return how many points of a grid over tile ``row`` fall on each class, (C,)."""
    tile = tiles.region(row)
    longer = max(tile.width, tile.height)
    grid = min(points, longer)
    width, height = (max(1, side * grid // longer) for side in (tile.width, tile.height))
    coarse = Region(tile.l0_x, tile.l0_y, width, height, tile.mpp * longer / grid)
    mask = np.empty((height, width), np.uint8)
    with pool.lease(tiles.slide_id(row)) as slide:
        truth.read_mask(tiles.slide_id(row), slide, coarse, mask)
    return np.bincount(mask.ravel(), minlength=256)[: len(truth.classes)].astype(np.int64)


def _check_training_part(dataset: Dataset) -> None:
    """Refuse too little to train on; log classes that no tile trains or validates."""
    train, held_out = dataset.rows("train"), dataset.rows("val")
    if len(train) == 0:
        raise ValueError("the training split holds no tile: lower --validation, --test or --min-tissue, or add slides")
    learned, scored = _classes_on(dataset, train), _classes_on(dataset, held_out)
    if dataset.tile_labels is not None and len(learned) < 2:
        raise ValueError(
            f"all training tiles have the class {min(learned)!r}: a classifier needs two; "
            "check the labels, or lower --validation so that more slides are trained on"
        )
    unit = "tile" if dataset.task == "classify" else "slide"
    if absent := [name for name in dataset.classes if name not in learned]:
        log.warning(
            "no training %s shows %s: not learned in this run; move slides of it to train with --splits FILE, or leave "
            "the class out with --class-map",
            *(unit, listed(absent)),
        )
    if len(held_out) and (unscored := [name for name in dataset.classes if name in learned - scored]):
        log.warning("no validation %s shows %s: scores of this run say nothing about it", unit, listed(unscored))


def _classes_on(dataset: Dataset, rows: NDArray[np.int64]) -> set[str]:
    """Return the classes of the tiles ``rows``; of pixels the background, and what their slides show."""
    if dataset.tile_labels is not None:
        return {dataset.classes[k] for k in np.unique(dataset.tile_labels[rows]).tolist()}
    assert isinstance(dataset.truth, SlideAnnotations)
    slides = [dataset.tiles.slides[k] for k in np.unique(dataset.tiles.slide[rows]).tolist()]
    return {dataset.classes[0]}.union(*(dataset.truth.visible[slide] for slide in slides))


def class_counts(dataset: Dataset, rows: NDArray[np.int64], *, of_slides: bool = False) -> NDArray[np.int64]:
    """Return how many of the tiles ``rows`` (classify), or points in a sample of them (segment), each class has: (C,).

    Args:
        of_slides: count their slides, where a slide is one sample.
    """
    if of_slides:
        labels = [dataset.slide_labels[dataset.tiles.slides[k]] for k in np.unique(dataset.tiles.slide[rows])]
        return np.bincount(labels, minlength=len(dataset.classes)).astype(np.int64)
    if dataset.tile_labels is not None:
        return np.bincount(dataset.tile_labels[rows], minlength=len(dataset.classes)).astype(np.int64)
    sample = rows[:: max(1, len(rows) // WEIGHT_SAMPLE)]
    areas, unread = class_areas(dataset, sample)
    if len(sample) < len(rows) and not areas.any(0).all():  # a class of weight 0 is not learned
        areas, unread = class_areas(dataset, rows)
    if unread:
        log.warning("--class-weights balanced: %d of %d tiles cannot be read and are not counted", unread, len(areas))
    counts: NDArray[np.int64] = areas.sum(0)
    if not counts.any():
        raise ValueError(
            f"--class-weights balanced: nothing is drawn that counts on {len(areas)} training tiles, of which {unread} "
            "cannot be read; look at the annotations, or leave it out"
        )
    if absent := [name for name, count in zip(dataset.classes, counts.tolist(), strict=True) if not count]:
        log.warning(
            "--class-weights balanced: no training tile has %s on its grid of %d points: their cross entropy has "
            "weight 0; leave the flag out, or draw more of them",
            *(listed(absent), LABEL_GRID),
        )
    return counts


def class_areas(dataset: Dataset, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return the points of each class on a grid over each of the tiles ``rows``, (n, C), and how many tiles cannot be
    read: these, which are recorded where they are read for training, have none."""
    assert isinstance(dataset.truth, SlideAnnotations)
    areas, unread = np.zeros((len(rows), len(dataset.classes)), np.int64), 0
    with contextlib.closing(dataset.pool(1)) as pool:
        for k, row in enumerate(rows.tolist()):
            try:
                areas[k] = _class_areas(dataset.tiles, row, dataset.truth, pool)
            except SlideError:
                unread += 1
    return areas, unread
