"""Annotation files of any kind as GeoJSON or as masks.

Names of classes go along: a mask's ids are in the ``classes.txt`` of its folder, which is made or extended.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.mask import Mask
from pipelines.backends.tiff_writer import TILE, write_mask
from pipelines.labels.annotation_files import CLASSES_FILE, AnnotationFiles, damaged_is_slide_error, read_annotation
from pipelines.labels.annotations import mask_classes, named_ids
from pipelines.labels.class_names import IGNORE, class_id, is_learned
from pipelines.labels.drawing import BACKGROUND, Drawing, Origin, make_drawing, printable_name
from pipelines.labels.geojson import write_geojson
from pipelines.labels.outlines import outlines
from pipelines.labels.rasterize import PixelGrid, mask_box, paint
from pipelines.slides.geometry import Size, l_from_l0
from pipelines.slides.slide import Slide

IGNORED = "ignore"
"""Class of the areas of a mask that have the value 255."""


def read_areas(path: Path, slide: Slide | None) -> Drawing:
    """Return the areas of any annotation file; those of a mask lie along its pixels' edges.

    Args:
        path: the file; its suffix says what it is.
        slide: what a mask's pixels are placed on.

    Raises:
        SlideError: the file cannot be read, or a mask has not the slide's proportions.
        ValueError: a mask's values have no names.
    """
    with damaged_is_slide_error(path):
        annotation = read_annotation(path)
    if isinstance(annotation, Drawing):
        return annotation
    assert slide is not None, "the command asks for one"
    return _mask_areas(annotation, slide)


def _mask_areas(mask: Mask, slide: Slide) -> Drawing:
    box = mask_box(mask, slide)
    with damaged_is_slide_error(mask.path):
        polygons_by_value = outlines(mask)
    files = AnnotationFiles({mask.path.stem: mask.path}, (), str(mask.path))
    names = {value: printable_name(name) for value, name in mask.names.items()}
    if not names:
        names = {IGNORE: IGNORED} | mask_classes({mask.path.stem: set(polygons_by_value)}, files)
    scale = np.array([box.width / mask.width, box.height / mask.height])
    corner = np.array([box.l0_x, box.l0_y])
    polygons = [[ring * scale + corner for ring in rings] for p in polygons_by_value.values() for rings in p]
    return make_drawing(
        polygons, [names[value] for value, p in polygons_by_value.items() for _ in p], {}, Origin.LEVEL0
    )


def write_areas(drawing: Drawing, path: Path, slide: Slide | None) -> None:
    """Write ``drawing`` as GeoJSON; the file appears under its name when it is whole.

    Args:
        drawing: areas, counted from wherever.
        path: the file to make.
        slide: whose bounds are taken off coordinates that count from level 0; without one they count as (0, 0).
    """
    unfinished = path.with_name(f".{path.name}.part")
    try:
        write_geojson(_counted_from(Origin.BOUNDS, drawing, slide), unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _counted_from(origin: Origin, drawing: Drawing, slide: Slide | None) -> Drawing:
    if drawing.origin is origin or slide is None:
        return drawing.moved(0, 0, origin)
    sign = 1 if drawing.origin is Origin.BOUNDS else -1
    return drawing.moved(sign * slide.bounds.l0_x, sign * slide.bounds.l0_y, origin)


def write_area_mask(drawing: Drawing, path: Path, slide: Slide, mpp: float) -> Size:
    """Return the size in px of the mask that is written of ``drawing``: of the whole of level 0 at ``mpp``.

    The ids of its classes go into the ``classes.txt`` of the folder.

    Raises:
        ValueError: more classes than a mask can hold, or a PNG that would be too large.
        OSError: the disk is full or the folder not writable.
    """
    drawing = _counted_from(Origin.LEVEL0, drawing, slide)
    level = slide.levels[0]
    size = Size(*(max(1, l_from_l0(side, mpp / slide.mpp)) for side in (level.width, level.height)))
    classes = _class_ids(drawing, path.parent / CLASSES_FILE)
    ids = np.array([class_id(name, classes) for name in drawing.classes], np.uint8)
    step_x, step_y = level.width / size.width, level.height / size.height

    def bands() -> Iterator[NDArray[np.uint8]]:
        for row in range(0, size.height, TILE):
            rows = min(TILE, size.height - row)
            band = np.zeros((rows, size.width), np.uint8)
            paint(drawing, ids, PixelGrid(0.0, row * step_y, step_x, step_y, size.width, rows), (0, 0), band)
            yield band

    write_mask(path, size, mpp, bands())
    lines = [f"{index} {name}\n" for index, name in enumerate(classes) if name and index]
    (path.parent / CLASSES_FILE).write_text("".join(lines), encoding="utf-8")
    return size


def _class_ids(drawing: Drawing, path: Path) -> list[str]:
    """Names by id: those that ``classes.txt`` has, then the new ones on the lowest free ids; "" where an id is free."""
    named = named_ids([path]) if path.is_file() else {}
    classes = [BACKGROUND, *(named.get(index, "") for index in range(1, IGNORE))]
    for name in drawing.classes:
        if is_learned(name) and name not in classes:
            if "" not in classes:
                raise ValueError(f"{path} has no id left for class {name!r}: a mask holds {IGNORE - 1} classes")
            classes[classes.index("")] = name
    return classes
