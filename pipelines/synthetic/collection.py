"""A folder of artificial slides with what is known about them: labels or masks, and patients.

Takes how many slides of which task; gives the files, each a pure function of (seed, number), so that a collection can
grow and a broken-off one go on. ``synthetic.json`` says what made the folder; another collection does not write over
it.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from pipelines.slides.geometry import Size
from pipelines.synthetic.arrangement import CROWDED, EVEN, GROUPED
from pipelines.synthetic.lattice import cell_rng
from pipelines.synthetic.painter import paint
from pipelines.synthetic.scene import GLAND, Scene, SceneSpec

DRAWING = 3
"""Raised whenever the same seed would give other pixels."""

RECORD = "synthetic.json"

CLASSES = {"even": EVEN, "grouped": GROUPED}
"""The two classes of `classify`."""

Task = Literal["classify", "segment"]
Report = Callable[[str, int, int], None]
"""Called with the slide at work, and rows of its blocks done and to do."""


@dataclass(frozen=True)
class Collection:
    """What to make: ``slides`` slides of ``size`` x ``size`` px, with ``mpp`` um/px written into them."""

    task: Task
    slides: int
    size: int
    seed: int
    mpp: float


@dataclass(frozen=True)
class PlannedSlide:
    """One slide before it is drawn. ``label`` is empty for `segment`."""

    slide_id: str
    number: int
    label: str
    patient: str


def planned(collection: Collection) -> list[PlannedSlide]:
    """Return the slides of a collection: one or two per patient, patients of one class, classes in turn.

    Growing a collection adds slides to the end and changes none; of any first n slides each class has half, within one.
    """
    return list(islice(_endless(collection), collection.slides))


def _endless(collection: Collection) -> Iterator[PlannedSlide]:
    number = 0
    pair = 0
    while True:
        rng = cell_rng(collection.seed, 0x9A71, pair)
        classes = [list(CLASSES)[k] for k in rng.permutation(2)]
        for _ in range(int(rng.integers(1, 3))):
            for which, name in enumerate(classes):
                label = name if collection.task == "classify" else ""
                yield PlannedSlide(f"slide_{number:04d}", number, label, f"patient_{2 * pair + which:04d}")
                number += 1
        pair += 1


def make_collection(collection: Collection, out: Path, *, workers: int, report: Report) -> int:
    """Write a collection; slides that are there already are kept.

    Args:
        out: folder, made if missing.
        workers: threads that draw.
        report: told how it goes.

    Returns:
        how many slides were drawn.

    Raises:
        ValueError: ``out`` holds another collection, or files that this one would write over.
        OSError: ``out`` cannot be written or the disk is full. Whole slides stay, the one at work is removed.
    """
    plan = planned(collection)
    try:
        _claim(collection, plan, out)
        made = 0
        for slide in plan:
            path, mask_path = out / f"{slide.slide_id}.tif", None
            if collection.task == "segment":
                mask_path = out / "annotations" / path.name
            if not path.exists():
                _draw(collection, slide, path, mask_path, workers, report)
                made += 1
        return made
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
        if before["slides"] > collection.slides:
            return  # fewer are asked for than are there: all of them stay, and so do their tables
    else:
        files = [out / "labels.csv", *(out / f"{slide.slide_id}.tif" for slide in plan)]
        if there := [path for path in files if path.exists()]:
            raise ValueError(f"{there[0]} is there already and was not made by app.synth. Choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    if collection.task == "segment":
        (out / "annotations").mkdir(exist_ok=True)
        _publish(out / "annotations" / "classes.txt", f"0 background\n{GLAND} gland\n")
        lines = ["slide,patient"] + [f"{slide.slide_id},{slide.patient}" for slide in plan]
    else:
        lines = ["slide,label,patient"] + [f"{slide.slide_id},{slide.label},{slide.patient}" for slide in plan]
    _publish(out / "labels.csv", "\n".join(lines) + "\n")
    _publish(record_path, json.dumps(record, indent=2) + "\n")


def _draw(
    collection: Collection, slide: PlannedSlide, path: Path, mask_path: Path | None, workers: int, report: Report
) -> None:
    arrangement = CLASSES[slide.label] if slide.label else CROWDED
    slide_seed = int(cell_rng(collection.seed, 0x51D3, slide.number).integers(1 << 31))
    scene = Scene(SceneSpec(collection.seed, slide_seed, Size(collection.size, collection.size), arrangement))
    facts = {
        "made by": "megatile app.synth",
        "drawing": DRAWING,
        "task": collection.task,
        "seed": collection.seed,
        "number": slide.number,
    }
    paint(
        scene,
        path,
        mask_path,
        mpp=collection.mpp,
        description=json.dumps(facts),
        workers=workers,
        progress=lambda done, total: report(slide.slide_id, done, total),
    )


def _publish(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text)
    os.replace(temporary, path)
