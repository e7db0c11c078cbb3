"""Annotation files of any kind as GeoJSON or as masks, and polygons along the edges of a mask's pixels.

Painted again at the mask's size, outlines give the mask. Their corners are found band by band, so a mask is never in
memory whole; pixels that touch at a corner only are not joined, so the polygons are valid. Names of classes go along: a
mask's ids are in the ``classes.txt`` of its folder, which is made or extended; sub-folders share one list.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import shapely
from numpy.typing import NDArray

from pipelines.backends.mask import BAND_ROWS, Mask, open_mask
from pipelines.backends.tiff_writer import TILE, write_mask
from pipelines.labels.annotation_files import (
    CLASSES_FILE,
    MASK_SUFFIXES,
    AnnotationFiles,
    damaged_is_slide_error,
    folder_names,
    mask_classes,
    named_ids,
    read_annotation,
)
from pipelines.labels.class_names import IGNORE, class_id, is_learned
from pipelines.labels.drawing import BACKGROUND, Origin, PolygonSet, make_polygon_set, printable_name
from pipelines.labels.geojson import write_geojson
from pipelines.labels.rasterize import PixelGrid, mask_box, paint
from pipelines.slides.geometry import Size, l_from_l0
from pipelines.slides.slide import Slide, SlideError
from pipelines.slides.whole_files import lock, replacing, write_text

log = logging.getLogger(__name__)
Rings = list[NDArray[np.float64]]


def outlines(mask: Mask) -> dict[int, list[Rings]]:
    """Return the polygons of every value but 0: rings are float64 (n, 2), not closed, the outer one first.

    Raises:
        SlideError: the file is damaged, or a value does not fit into a byte.
    """
    places, around = _corners(mask)
    values = sorted(set(np.unique(around).tolist()) - {0})
    return {value: _polygons(places, around == value) for value in values}


def _corners(mask: Mask) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return all places of the pixel lattice where pixels around differ, and not just across a straight line, int64
    (n, 2), (x, y); and the pixels around each, uint8 (n, 4), upper left, upper right, lower left, lower right."""
    columns = np.arange(-1, mask.width + 1)
    places: list[NDArray[np.int64]] = []
    around: list[NDArray[np.uint8]] = []
    for row in range(-1, mask.height, BAND_ROWS):
        rows = np.arange(row, min(row + BAND_ROWS, mask.height) + 1)  # one more than lattice rows; 0 outside
        pixels = np.empty((len(rows), len(columns)), np.uint8)
        mask.sample(columns, rows, pixels)
        a, b, c, d = pixels[:-1, :-1], pixels[:-1, 1:], pixels[1:, :-1], pixels[1:, 1:]
        y, x = np.nonzero(~(((a == b) & (c == d)) | ((a == c) & (b == d))))
        places.append(np.column_stack([x, y + row + 1]))
        around.append(np.column_stack([a[y, x], b[y, x], c[y, x], d[y, x]]))
    return np.concatenate(places), np.concatenate(around)


def _polygons(places: NDArray[np.int64], inside: NDArray[np.bool_]) -> list[Rings]:
    """The polygons of one value, given which pixels around each place have it, bool (n, 4)."""
    x, y, right, down, leaves_sideways = _turns(places, inside)
    # on a row, edges start at a turn to the right and end at one from the left: sorted, neighbours pair up
    sideways = _partners(np.lexsort((right, x, y)))
    upright = _partners(np.lexsort((down, y, x)))
    following = np.where(leaves_sideways, sideways, upright)
    rings = _loops(following.tolist(), (y * (int(x.max(initial=0)) + 1) + x).tolist())
    points = np.column_stack([x, y]).astype(np.float64)
    return _grouped([points[members] for members in rings])


def _loops(following: list[int], place: list[int]) -> list[list[int]]:
    """Turns of every ring, in order; one that comes back to a place is two rings that touch there."""
    loops: list[list[int]] = []
    visited = bytearray(len(following))
    for first in range(len(following)):
        path: list[int] = []
        at: dict[int, int] = {}  # index in the path by place
        turn = first
        while not visited[turn]:
            visited[turn] = 1
            if (begin := at.get(place[turn])) is not None:
                loops.append(path[begin:])
                for passed in path[begin:]:
                    del at[place[passed]]
                del path[begin:]
            at[place[turn]] = len(path)
            path.append(turn)
            turn = following[turn]
        if path:
            loops.append(path)
    return loops


def _turns(places: NDArray[np.int64], inside: NDArray[np.bool_]) -> tuple[NDArray[np.int64], ...]:
    """Corners of the outline, its inside on the right: x, y, goes right, goes down, leaves sideways."""
    a, b, c, d = inside.T
    corner = (a ^ b ^ c ^ d).astype(bool)
    falling, rising = a & d & ~b & ~c, b & c & ~a & ~d
    turns = [
        (corner, b != d, c != d, np.where(b != d, d, a)),
        (falling, False, False, True),  # around the upper left pixel, then around the lower right one
        (falling, True, True, True),
        (rising, True, False, False),
        (rising, False, True, False),
    ]
    columns = [
        np.column_stack([places[chosen], *(np.broadcast_to(flag, chosen.shape)[chosen] for flag in flags)])
        for chosen, *flags in turns
    ]
    x, y, right, down, leaves_sideways = np.concatenate(columns).T
    return x, y, right, down, leaves_sideways


def _partners(order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Index of the other end of each turn's edge, given the order in which ends follow each other two by two."""
    partner = np.empty_like(order)
    partner[order[::2]], partner[order[1::2]] = order[1::2], order[::2]
    return partner


def _grouped(rings: Rings) -> list[Rings]:
    """Return outer rings, each with its holes: those of which it is the smallest outer ring around them."""
    sizes = np.array(list(map(len, rings)))
    number, corners = np.repeat(np.arange(len(rings)), sizes), np.concatenate(rings)
    lines = np.asarray(shapely.linearrings(corners, indices=number))
    is_hole = ~shapely.is_ccw(lines)  # the inside lies on the right
    outer, holes = np.flatnonzero(~is_hole), np.flatnonzero(is_hole)
    areas = np.asarray(shapely.polygons(lines[outer]))
    by_area = np.argsort(-shapely.area(areas))
    uppermost_left = corners[np.lexsort((corners[:, 0], corners[:, 1], number))[np.cumsum(sizes) - sizes]]
    beside = shapely.STRtree(np.asarray(shapely.points(uppermost_left[holes] + (-0.5, 0.5))))  # pixels left of holes
    around, held = beside.query(areas[by_area], predicate="contains")
    smaller_last = np.argsort(around, kind="stable")
    holder = np.empty(len(holes), np.int64)
    holder[held[smaller_last]] = outer[by_area[around[smaller_last]]]
    polygons = {k: [rings[k]] for k in outer.tolist()}
    for k, hole in zip(holder.tolist(), holes.tolist(), strict=True):
        polygons[k].append(rings[hole])
    return list(polygons.values())


IGNORED = "ignore"
"""Class of the areas of a mask that have the value 255."""

LOCK_FILE = ".classes.lock"
"""Locked in the folder of a conversion while ids are given to classes."""


def classes_of_masks(paths: Iterable[Path], source: str) -> dict[int, str]:
    """Return the class name by value, ascending, for all masks among ``paths`` that name no classes themselves.

    The names are those of the ``classes.txt`` files, else by the values of all masks that can be read.

    Args:
        source: where the masks come from, for errors.

    Raises:
        ValueError: values without a name, or an id of two names.
    """
    files = AnnotationFiles({str(path): path for path in paths if path.suffix.lower() in MASK_SUFFIXES}, (), source)
    if named := folder_names(files):
        return dict(sorted(named.items()))
    values: dict[str, set[int]] = {}
    for name, path in files.path.items():
        with contextlib.suppress(SlideError), damaged_is_slide_error(path):  # reported when it is converted
            of_mask = open_mask(path).values()
            if of_mask <= set(range(IGNORE + 1)):
                values[name] = of_mask
    return mask_classes(values, files, {})


def read_areas(path: Path, slide: Slide | None, named: Mapping[int, str] | None = None) -> PolygonSet:
    """Return the areas of any annotation file; those of a mask lie along its pixels' edges.

    Args:
        path: the file.
        slide: the slide that was drawn on; a mask needs it.
        named: as `classes_of_masks` returns; None or empty: by this mask and its folder alone.

    Raises:
        SlideError: the file cannot be read, or a mask has not the slide's proportions.
        ValueError: a mask's values have no names.
    """
    with damaged_is_slide_error(path):
        annotation = read_annotation(path)
    if isinstance(annotation, PolygonSet):
        return annotation
    assert slide is not None, "the command asks for one"
    mask, box = annotation, mask_box(annotation, slide)
    with damaged_is_slide_error(mask.path):
        polygons_by_value = outlines(mask)
    files = AnnotationFiles({mask.path.stem: mask.path}, (), str(mask.path))
    names = {value: printable_name(name) for value, name in mask.names.items()}
    if not names:
        values = {mask.path.stem: set(polygons_by_value)}
        names = {IGNORE: IGNORED} | mask_classes(values, files, named or folder_names(files))
    scale = np.array([box.width / mask.width, box.height / mask.height])
    corner = np.array([box.l0_x, box.l0_y])
    polygons = [[ring * scale + corner for ring in rings] for p in polygons_by_value.values() for rings in p]
    return make_polygon_set(
        polygons, [names[value] for value, p in polygons_by_value.items() for _ in p], {}, Origin.LEVEL0
    )


def write_areas(drawing: PolygonSet, path: Path, slide: Slide | None) -> None:
    """Write ``drawing`` as GeoJSON; the file appears under its name when it is whole.

    Args:
        drawing: areas, counted from wherever.
        path: the file to make.
        slide: whose bounds are taken off coordinates that count from level 0; without one they count as (0, 0).
    """
    with replacing(path) as temporary:
        write_geojson(_counted_from(Origin.BOUNDS, drawing, slide), temporary)


def _counted_from(origin: Origin, drawing: PolygonSet, slide: Slide | None) -> PolygonSet:
    if drawing.origin is origin or slide is None:
        return dataclasses.replace(drawing, origin=origin)
    sign = 1 if drawing.origin is Origin.BOUNDS else -1
    return drawing.moved(sign * slide.bounds.l0_x, sign * slide.bounds.l0_y, origin)


def write_area_mask(
    drawing: PolygonSet, path: Path, slide: Slide, mpp: float, first: Iterable[str] = (), out: Path | None = None
) -> Size:
    """Return the size in px of the mask that is written of ``drawing``: of all of level 0 at ``mpp``.

    The ids of its classes go into the ``classes.txt`` of the folder before it is painted.

    Args:
        first: classes that get an id before its own.
        out: folder whose ``classes.txt`` lists the classes of all its sub-folders; None: that of the mask.

    Raises:
        ValueError: more classes than a mask can hold, or a PNG that would be too large.
        OSError: the disk is full or the folder not writable.
    """
    drawing = _counted_from(Origin.LEVEL0, drawing, slide)
    level = slide.levels[0]
    size = Size(*(max(1, l_from_l0(side, mpp / slide.mpp)) for side in (level.width, level.height)))
    classes = _class_ids([*first, *drawing.classes], path.parent, out or path.parent)
    ids = np.array([class_id(name, classes) for name in drawing.classes], np.uint8)
    step_x, step_y = level.width / size.width, level.height / size.height

    def bands() -> Iterator[NDArray[np.uint8]]:
        for row in range(0, size.height, TILE):
            rows = min(TILE, size.height - row)
            band = np.zeros((rows, size.width), np.uint8)
            paint(drawing, ids, PixelGrid(0.0, row * step_y, step_x, step_y, size.width, rows), (0, 0), band)
            yield band

    write_mask(path, size, mpp, bands())
    return size


def _class_ids(names: Iterable[str], folder: Path, out: Path) -> list[str]:
    """Return names by id, and write them to the ``classes.txt`` of both folders: names that are there, then the new
    ones on the lowest free ids; "" where an id is free."""
    files = sorted({out / CLASSES_FILE, folder / CLASSES_FILE})
    # Of conversions into one folder at once, each waits for the list of the other: an id is never given twice.
    with (out / LOCK_FILE).open("a") as lock_file:
        if not lock(lock_file.fileno()):
            _warn_without_locks(out)
        named = named_ids([path for path in files if path.is_file()])
        classes = [BACKGROUND, *(named.get(index, "") for index in range(1, IGNORE))]
        for name in names:
            if is_learned(name) and name not in classes:
                if "" not in classes:
                    raise ValueError(f"{files[0]} has no id left for class {name!r}: a mask holds {IGNORE - 1} classes")
                classes[classes.index("")] = name
        text = "".join(f"{index} {name}\n" for index, name in enumerate(classes) if name and index)
        for path in files:
            write_text(path, text)
    return classes


@functools.cache
def _warn_without_locks(folder: Path) -> None:
    text = "%s: this disk has no locks: run one conversion into the folder at a time, or two classes may get one id"
    log.warning(text, folder)
