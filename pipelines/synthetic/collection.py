"""A folder of artificial slides with labels or masks, and patients.

Each slide is a function of (seed, number), so a collection can grow and a broken-off one go on. ``synthetic.json`` says
what made the folder; another collection does not write over it.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import cv2
import numpy as np

from pipelines.backends.tiff_writer import JPEG, PyramidWriter
from pipelines.slides.geometry import Size
from pipelines.slides.whole_files import write_text
from pipelines.synthetic.tissue import BLOCK, GLAND, Arrangement, Scene, cell_rng

DRAWING = 4
"""Raised whenever the same seed would give other pixels."""

RECORD = "synthetic.json"

CLASSES = {"crowded": Arrangement(0.9), "sparse": Arrangement(0.3)}
"""The two classes of `classify`."""

OVERVIEW, MASK_SCALE = 512, 2
"""Px of the longer side of the coarsest level at most; a mask is so many times coarser than its slide."""

Task = Literal["classify", "segment"]
Report = Callable[[str, int, int], None]
"""Called with the slide at work, and rows of its blocks done and to do."""


@dataclass(frozen=True)
class Collection:
    """``slides`` slides of ``size`` x ``size`` px, with ``mpp`` um/px written into them."""

    task: Task
    slides: int
    size: int
    seed: int
    mpp: float


@dataclass(frozen=True)
class PlannedSlide:
    """One slide before it is drawn. ``label`` is empty for `segment`."""

    slide_id: str
    label: str
    patient: str


def planned(collection: Collection) -> list[PlannedSlide]:
    """Return the slides of a collection: one or two per patient, patients of one class, classes alternating.

    Growing a collection adds slides to the end and changes none; of any first n slides each class has half, within one.
    """
    slides: list[PlannedSlide] = []
    pair = 0
    while len(slides) < collection.slides:
        rng = cell_rng(collection.seed, 0x9A71, pair)
        classes = [list(CLASSES)[k] if collection.task == "classify" else "" for k in rng.permutation(2)]
        for _ in range(int(rng.integers(1, 3))):
            for which, label in enumerate(classes):
                number, patient = len(slides), f"patient_{2 * pair + which:04d}"
                slides.append(PlannedSlide(f"slide_{number:04d}", label, patient))
        pair += 1
    return slides[: collection.slides]


def make_collection(collection: Collection, out: Path, *, workers: int, report: Report) -> int:
    """Write a collection into the folder ``out``; return how many slides were drawn, the others were there.

    Raises:
        ValueError: ``out`` holds another collection, or files that this one would write over.
        OSError: ``out`` cannot be written or the disk is full. Whole slides stay, the one at work is removed.
    """
    try:
        plan = planned(collection)
        _claim(collection, plan, out)
        todo = [(number, slide) for number, slide in enumerate(plan) if not (out / f"{slide.slide_id}.tif").exists()]
        for number, slide in todo:
            slide_seed = int(cell_rng(collection.seed, 0x51D3, number).integers(1 << 31))
            size, arrangement = Size(collection.size, collection.size), CLASSES.get(slide.label, Arrangement(0.8))
            facts = {"made by": "megatile app.synth", "drawing": DRAWING, "task": collection.task}
            path = out / f"{slide.slide_id}.tif"
            paint(
                Scene(collection.seed, slide_seed, size, arrangement),
                path,
                out / "annotations" / path.name if collection.task == "segment" else None,
                mpp=collection.mpp,
                description=json.dumps({**facts, "seed": collection.seed, "number": number}),
                workers=workers,
                progress=functools.partial(report, slide.slide_id),
            )
        return len(todo)
    except OSError as fault:
        if fault.errno == errno.ENOSPC:
            raise OSError(
                f"the disk of {out} is full. Slides that are whole were kept; make room and run the same command again"
            ) from fault
        raise OSError(f"{out} cannot be written: {fault.strerror or fault}. Choose another folder") from fault


def _claim(collection: Collection, plan: list[PlannedSlide], out: Path) -> None:
    """Make the folder and its tables, or refuse it."""
    record = {"drawing": DRAWING, **dataclasses.asdict(collection)}
    record_path = out / RECORD
    if record_path.exists():
        try:
            before = json.loads(record_path.read_text())
        except ValueError as fault:
            raise ValueError(f"{record_path} is damaged: {fault}. Choose another folder or remove it") from fault
        other = [
            f"{key} {before.get(key)!r}, asked {record[key]!r}" for key in record if before.get(key) != record[key]
        ]
        if other and not (len(other) == 1 and before["slides"] != record["slides"]):
            raise ValueError(
                f"{out} holds other artificial slides ({'; '.join(other)}). Choose another folder or remove them"
            )
        if before["slides"] >= collection.slides:
            return  # no more are asked for than are there: they stay, and so do their tables, edited or not
    else:
        files = [out / "labels.csv", *(out / f"{slide.slide_id}.tif" for slide in plan)]
        if there := [path for path in files if path.exists()]:
            raise ValueError(f"{there[0]} is there already and was not made by app.synth. Choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, ...]] = [("slide", "label", "patient")]
    rows += [(slide.slide_id, slide.label, slide.patient) for slide in plan]
    if collection.task == "segment":
        rows = [(row[0], row[2]) for row in rows]
        (out / "annotations").mkdir(exist_ok=True)
        write_text(out / "annotations" / "classes.txt", f"0 background\n{GLAND} gland\n")
    write_text(out / "labels.csv", "".join(f"{','.join(row)}\n" for row in rows))
    write_text(record_path, json.dumps(record, indent=2) + "\n")


def paint(
    scene: Scene,
    path: Path,
    mask_path: Path | None,
    *,
    mpp: float,
    description: str,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write ``scene`` to ``path`` as a pyramidal JPEG BigTIFF, and the mask of its glands to ``mask_path`` if given.

    Args:
        mpp: um/px of level 0.
        description: ASCII text kept in both files, by which they are recognised later.
        workers: threads that draw and compress; each row of blocks is held as a whole.
        progress: called with rows of blocks done and to do.

    Raises:
        OSError: the disk is full or the folder not writable; there is no slide then, but its mask may be there.
    """
    width, height = scene.size.width, scene.size.height
    with ExitStack() as opened:
        threads = opened.enter_context(ThreadPoolExecutor(workers))
        slide = opened.enter_context(
            PyramidWriter(path, scene.size, mpp, description, JPEG, longest=OVERVIEW, threads=threads)
        )
        mask = None
        if mask_path is not None:
            mask_size = Size(-(-width // MASK_SCALE), -(-height // MASK_SCALE))
            mask = opened.enter_context(
                PyramidWriter(mask_path, mask_size, mpp * MASK_SCALE, description, longest=max(width, height))
            )
        band = np.empty((BLOCK, scene.columns * BLOCK, 3), np.uint8)
        glands = np.empty(band.shape[:2], np.uint8)

        def draw(place: tuple[int, int]) -> None:
            columns = np.s_[:, place[0] * BLOCK : (place[0] + 1) * BLOCK]
            band[columns], glands[columns] = scene.draw(*place)

        for row in range(scene.rows):
            list(threads.map(draw, ((column, row) for column in range(scene.columns))))
            rows = min(BLOCK, height - row * BLOCK)
            slide.add(band[:rows, :width])
            if mask is not None:
                reduced = (glands.shape[1] // MASK_SCALE, BLOCK // MASK_SCALE)
                share = cv2.resize(glands * 255, reduced, interpolation=cv2.INTER_AREA)
                mask.add((share[: -(-rows // MASK_SCALE), : mask_size.width] >= 128).astype(np.uint8))
            progress(row + 1, scene.rows)
