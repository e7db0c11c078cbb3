"""Class ids of the pixels of a tile, from what was drawn on its slide.

Takes annotation files (GeoJSON, ASAP and ImageScope XML, mask TIFF and PNG, DICOM Segmentations), one per slide; gives
``SlideAnnotations``, whose ``read_mask`` fills a uint8 array for any region: 0 background, then the classes, 255 where
the loss must not look.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.mask import Mask
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.counted import counted
from pipelines.catalog.table import listed
from pipelines.labels.annotation_cache import AnnotationCache, damaged_is_slide_error
from pipelines.labels.annotation_files import AnnotationFiles, classes_files
from pipelines.labels.class_names import IGNORE, ClassMap, class_id, is_learned
from pipelines.labels.drawing import BACKGROUND, UNNAMED_CLASS, Drawing, Origin, printable_name
from pipelines.labels.mask_placement import mask_pixels
from pipelines.labels.rasterize import PixelGrid, paint
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Slide, SlideError
from pipelines.slides.tile_box import TileBox

logger = logging.getLogger(__name__)

CLASS_LINE = re.compile(r"([0-9]{1,9})[\s:=,;]+(\S.*)")


@dataclass(frozen=True, slots=True)
class SlideAnnotations:
    """A drawing per slide.

    Attributes:
        classes: names by class id; 0 is the background.
        patient: by slide id; the slide id itself where nothing says otherwise.
        source: where the drawings come from, for the log.
        paths: annotation file by slide id; only slides whose file could be read.
        mask_ids: class id by value, for mask files.
        class_map: names to learn by names as drawn.
        failed: what is wrong with the annotation, by slide id, for slides whose file is damaged.
        unlabelled: slides without an annotation file; they take no part.
        unknown: annotation files without a slide.
        site: by slide id, of slides whose site is known.
    """

    classes: tuple[str, ...]
    patient: Mapping[str, str]
    source: str
    paths: Mapping[str, Path]
    mask_ids: Mapping[int, int] = field(default_factory=dict)
    class_map: ClassMap = field(default_factory=ClassMap)
    failed: Mapping[str, str] = field(default_factory=dict)
    unlabelled: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    site: Mapping[str, str] = field(default_factory=dict)
    _cache: AnnotationCache = field(default_factory=AnnotationCache, repr=False, compare=False)

    def read_mask(
        self, slide_id: str, slide: Slide, region: Region, out: NDArray[np.uint8], box: TileBox | None = None
    ) -> None:
        """Fill ``out`` with the class ids of ``region``: those of the pixels that ``slide.read(region)`` gives.

        A pixel has the class of its centre. GeoJSON counts from the corner of the slide's bounds, as QuPath does; a
        mask covers the whole of level 0, or the bounds where only these have its proportions. Safe in many threads.

        Args:
            slide_id: one of ``paths``.
            slide: that slide, open.
            region: as for ``slide.read``.
            out: uint8 (region.height, region.width), or of the size of ``box``.
            box: the part of the region whose class ids are asked for, as they are in all of it; None for all.

        Raises:
            SlideError: the annotation file is damaged, or a mask has not the slide's proportions.
            ValueError: ``out`` has another shape or type.
        """
        shape = (region.height, region.width) if box is None else (box.height, box.width)
        if out.shape != shape or out.dtype != np.uint8:
            raise ValueError(f"out must be uint8 {shape}; got {out.dtype} {out.shape}")
        path, grid = self.paths[slide_id], PixelGrid.of(slide, region, box)
        with damaged_is_slide_error(path):
            annotation = self._cache.get(path)
            if isinstance(annotation, Drawing):
                out[...] = 0
                learned = map(self.class_map.learned, annotation.classes)
                ids = np.array([class_id(name, self.classes) for name in learned], np.uint8)
                bounds = slide.bounds
                corner = (bounds.l0_x, bounds.l0_y) if annotation.origin is Origin.BOUNDS else (0, 0)
                paint(annotation, ids, grid, corner, out)
                return
            columns, rows = mask_pixels(annotation, slide, grid)
            annotation.sample(columns, rows, out)
        table = np.arange(256, dtype=np.uint8)
        for value, class_of_value in (self._segment_ids(annotation) if annotation.names else self.mask_ids).items():
            table[value] = class_of_value
        np.take(table, out, out=out, mode="clip")

    def _segment_ids(self, mask: Mask) -> dict[int, int]:
        """Class ids by value of a mask that names its classes; those without a pixel may be none of ``classes``."""
        names = {value: self.class_map.learned(printable_name(name)) for value, name in mask.names.items()}
        return {v: class_id(n, self.classes) for v, n in names.items() if n in self.classes or not is_learned(n)}


def read_annotations(
    files: AnnotationFiles,
    specs: Sequence[SlideSpec],
    patient: Mapping[str, str],
    site: Mapping[str, str] | None = None,
    class_map: ClassMap = ClassMap(),  # noqa: B008 - frozen
) -> SlideAnnotations:
    """Read every file once for the classes in it, and settle the class ids: sorted by name; for masks by value.

    Masks with the values 0 and 1, or 0 and 255, have one class, ``foreground``. Other masks hold class ids 1, 2, ...
    without a gap; where a ``classes.txt`` in their folder (lines ``1 tumour``) names ids, these and no others count.
    255 is then "ignore", as are classes named ``ignore...`` or ``exclude...``. ``class_map`` gives the names.

    Raises:
        ValueError: no file can be read, nothing is drawn in any of them, ids without a name, or a class map that lists
            what is not drawn.
    """
    cache = AnnotationCache()
    slides = sorted(files.path)
    failed: dict[str, str] = {}
    names: set[str] = set()
    values: dict[str, set[int]] = {}
    without_area = 0

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for slide, content in zip(
            slides, pool.map(lambda slide: _contents(cache, files.path[slide]), slides), strict=True
        ):
            if isinstance(content, SlideError):
                failed[slide] = str(content)
                continue
            drawn_names, of_no_area, mask_values = content
            names |= drawn_names
            without_area += of_no_area
            if mask_values is not None:
                values[slide] = mask_values
    if len(failed) == len(slides):
        raise ValueError(f"{files.source}: no annotation can be read; the first: {failed[slides[0]]}")
    mask_names = mask_classes(values, files)
    class_map.check(names | set(mask_names.values()))
    mask_names = {value: class_map.learned(mask_names[value]) for value in sorted(mask_names)}
    drawn = sorted(set(map(class_map.learned, names)))
    classes = (BACKGROUND, *filter(is_learned, dict.fromkeys([*mask_names.values(), *drawn])))
    if not 2 <= len(classes) < IGNORE:
        raise ValueError(
            f"{files.source}: the {len(slides) - len(failed)} files that can be read must draw between 1 and "
            f"{IGNORE - 2} classes; they draw {len(classes) - 1}"
            + (f" (and {without_area} points or lines)" if without_area else "")
        )
    unlabelled = tuple(sorted(spec.slide_id for spec in specs if spec.slide_id not in files.path))
    _log(files, failed, unlabelled, without_area)
    return SlideAnnotations(
        classes,
        {slide: patient[slide] for slide in slides if slide not in failed},
        files.source,
        {slide: files.path[slide] for slide in slides if slide not in failed},
        {value: class_id(name, classes) for value, name in mask_names.items()},
        class_map,
        failed,
        unlabelled,
        tuple(map(str, files.unknown)),
        {slide: name for slide, name in (site or {}).items() if slide in files.path and slide not in failed},
        cache,
    )


def _contents(cache: AnnotationCache, path: Path) -> tuple[set[str], int, set[int] | None] | SlideError:
    """Return names that are drawn, how much without area, and the values of a mask that does not name them; or what is
    wrong with the file."""
    try:
        with damaged_is_slide_error(path):
            annotation = cache.get(path)
            if isinstance(annotation, Drawing):
                if len(annotation.classes) >= IGNORE:
                    raise SlideError(f"annotation {path} draws {len(annotation.classes)} classes, above {IGNORE - 2}")
                return set(annotation.classes), annotation.without_area, None
            values = annotation.values()
            if annotation.names:
                return {printable_name(annotation.names[value]) for value in values - {0}}, 0, None
            if odd := [value for value in sorted(values) if not 0 <= value <= IGNORE]:
                raise SlideError(f"mask {path} has the value {odd[0]}; class ids are 0 to {IGNORE}. Is it a mask?")
            return set(), 0, values
    except SlideError as fault:
        return fault


def mask_classes(values: Mapping[str, set[int]], files: AnnotationFiles) -> dict[int, str]:
    """Return the class name by mask value, given the values in the mask of each slide.

    Raises:
        ValueError: ids without a name.
    """
    if not values:
        return {}
    named = named_ids(classes_files(files))
    present = set().union(*values.values()) - {0}
    if not named and present in ({1}, {IGNORE}):
        return {present.pop(): UNNAMED_CLASS}
    classes = named or {value: f"class_{value}" for value in range(1, len(present - {IGNORE}) + 1)}
    faults = [
        f"{files.path[slide]} has {listed([str(v) for v in sorted(odd)])}"
        for slide, of_slide in sorted(values.items())
        if (odd := of_slide - {0, IGNORE} - set(classes))
    ]
    if faults:
        where = min(files.path[slide].parent for slide in values)
        raise ValueError(
            f"{files.source}: mask values are class ids, {', '.join(f'{v} {n}' for v, n in classes.items())}, "
            f"0 for background and {IGNORE} for ignore; " + "\n  ".join(faults[:8]) + "\n"
            f"Name the ids in {where / 'classes.txt'}, a line `1 tumour` for each"
        )
    return classes


def named_ids(paths: Sequence[Path]) -> dict[int, str]:
    """Return class names by id from ``classes.txt`` files; 0 and ``IGNORE`` need no name.

    Raises:
        ValueError: no UTF-8, a line that is no id and name, or an id of two names.
    """
    named: dict[int, str] = {}
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise ValueError(f"{path} must be a text file in UTF-8: {fault}. Save it as UTF-8") from fault
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.startswith("#"):
                continue
            match = CLASS_LINE.fullmatch(line.strip())
            if match is None or not 0 <= int(match[1]) <= IGNORE:
                raise ValueError(
                    f"{path} line {number}: expected an id of 0..{IGNORE} and a name, as `1 tumour`; got {line!r}"
                )
            value, name = int(match[1]), match[2]
            if value not in (0, IGNORE) and named.setdefault(value, name) != name:
                raise ValueError(
                    f"{path} line {number}: id {value} is {name!r} here and {named[value]!r} before; keep one"
                )
    return named


def _log(files: AnnotationFiles, failed: Mapping[str, str], unlabelled: Sequence[str], without_area: int) -> None:
    for fault in failed.values():
        logger.warning("left out: %s", fault)
    if unlabelled:
        number = counted(len(unlabelled), "slide")
        logger.warning("%s: left out, without an annotation: %s: %s", files.source, number, listed(unlabelled))
    if files.unknown:
        names = [path.name for path in files.unknown]
        number = counted(len(names), "file")
        logger.warning("%s: for slides that are not there: %s: %s", files.source, number, listed(names))
    if without_area:
        logger.warning("%s: %d points, lines and empty features have no area: not used", files.source, without_area)
