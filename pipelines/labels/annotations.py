"""Class ids of the pixels of a tile, from what was drawn on its slide.

Takes annotation files (GeoJSON, ASAP and ImageScope XML, mask TIFF and PNG, DICOM Segmentations), one per slide; gives
``SlideAnnotations``, whose ``read_mask`` fills a uint8 array for any region: 0 background, then the classes, 255 where
the loss must not look.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.mask import Mask
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.table import listed, warn_of
from pipelines.labels.annotation_files import (
    AnnotationCache,
    AnnotationFiles,
    damaged_is_slide_error,
    folder_names,
    mask_classes,
)
from pipelines.labels.class_names import IGNORE, ClassMap, class_id, is_learned
from pipelines.labels.drawing import (
    BACKGROUND,
    UNNAMED_CLASS,
    Origin,
    PolygonSet,
    areas_within,
    painted_over,
    printable_name,
)
from pipelines.labels.rasterize import PixelGrid, mask_pixels, paint
from pipelines.slides.geometry import Bounds, Region, TileBox
from pipelines.slides.slide import Slide, SlideError

logger = logging.getLogger(__name__)

MOST_OUTSIDE = 0.01
"""Share of the annotated area that may lie outside of the slide unremarked: outlines drawn over the edge."""

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True)
class SlideAnnotations:
    """A drawing per slide.

    Attributes:
        classes: names by class id; 0 is the background.
        patient: by slide id, of slides whose patient is known.
        source: where the drawings come from, for the log.
        paths: annotation file by slide id; only slides whose file could be read.
        mask_ids: class id by value, for mask files.
        class_map: names to learn by names as drawn.
        failed: what is wrong with the annotation, by slide id, for slides whose file is damaged.
        unlabelled: slides without an annotation file; they take no part.
        site: by slide id, of slides whose site is known.
        box: left, top, right and bottom of all that is drawn, by slide id, in the coordinates of the file.
        digest: of the bytes of all files in ``paths``: another one where something is drawn anew.
        visible: names of areas with a pixel on the slide, by slide id.
    """

    classes: tuple[str, ...]
    patient: Mapping[str, str]
    source: str
    paths: Mapping[str, Path]
    mask_ids: Mapping[int, int] = field(default_factory=dict)
    class_map: ClassMap = field(default_factory=ClassMap)
    failed: Mapping[str, str] = field(default_factory=dict)
    unlabelled: tuple[str, ...] = ()
    site: Mapping[str, str] = field(default_factory=dict)
    box: Mapping[str, Box] = field(default_factory=dict)
    digest: str = ""
    visible: Mapping[str, set[str]] = field(default_factory=dict)
    _cache: AnnotationCache = field(default_factory=AnnotationCache, repr=False, compare=False)

    def read_mask(
        self,
        slide_id: str,
        slide: Slide,
        region: Region | PixelGrid,
        out: NDArray[np.uint8],
        box: TileBox | None = None,
    ) -> None:
        """Fill ``out`` with the class ids of ``region``: those of the pixels that ``slide.read(region)`` gives, or of a
        grid.

        A pixel has the class of its centre. GeoJSON counts from the corner of the slide's bounds, as QuPath does; a
        mask covers all of level 0, or the bounds where only these have its proportions. Safe in many threads.

        Args:
            slide_id: one of ``paths``; ``slide`` is that slide, open.
            out: uint8 (region.height, region.width), or of the size of ``box``.
            box: the part of a region whose class ids are asked for, as they are in all of it; None for all.

        Raises:
            SlideError: the annotation file is damaged, or a mask has not the slide's proportions.
            ValueError: ``out`` has another shape or type.
        """
        grid = region if isinstance(region, PixelGrid) else PixelGrid.of(slide, region, box)
        shape = grid.height, grid.width
        if out.shape != shape or out.dtype != np.uint8:
            raise ValueError(f"out must be uint8 {shape}; got {out.dtype} {out.shape}")
        path = self.paths[slide_id]
        with damaged_is_slide_error(path):
            annotation = self._cache.get(path)
            if isinstance(annotation, PolygonSet):
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

    def outside(self, slide_id: str, width: int, height: int, bounds: Bounds | None = None) -> str:
        """Return what of a drawing lies outside of its slide, for the log; empty where next to nothing does.

        Args:
            slide_id: one of ``paths``.
            width, height: of level 0 in px.
            bounds: the scanned part of level 0; None: not known, all of level 0.

        Raises:
            SlideError: all of it lies outside.
        """
        box, path = self.box.get(slide_id), self.paths[slide_id]
        if box is None:
            return ""
        with damaged_is_slide_error(path):
            if box[0] >= 0 and box[1] >= 0 and box[2] <= width and box[3] <= height and bounds is None:
                return ""
            drawing = self._cache.get(path)
            assert isinstance(drawing, PolygonSet)
            x, y = (bounds.l0_x, bounds.l0_y) if bounds and drawing.origin is Origin.BOUNDS else (0, 0)
            whole = areas_within(drawing, *box)
            within = areas_within(drawing, -x, -y, width - x, height - y)
        drawn, off = whole > 0, (whole > 0) & (within <= 1e-6 * whole)  # decimals leave rounding errors
        if drawn.any() and off.sum() == drawn.sum():
            raise SlideError(
                f"annotation {path} lies completely outside of its slide: it is drawn from x {box[0]:.0f}, y "
                f"{box[1]:.0f} to x {box[2]:.0f}, y {box[3]:.0f}, the slide has {width} x {height} px. Is it of "
                "another slide? Coordinates are px of level 0"
            )
        share = 1 - within.sum() / whole.sum() if drawn.any() else 0.0
        if share <= MOST_OUTSIDE and not off.any():
            return ""
        return f"{share:.1%} of the annotated area lies outside of the slide, {off.sum()} of {drawn.sum()} areas wholly"

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
    *,
    known: Collection[str] | None = None,
) -> SlideAnnotations:
    """Read every file once for the classes in it, and settle the class ids: sorted by name; for masks by value.

    Masks with the values 0 and 1, or 0 and 255, have one class, ``foreground``. Other masks hold class ids 1, 2, ...
    without a gap; where a ``classes.txt`` in their folder (lines ``1 tumour``) names ids, these and no others count.
    255 among others is "ignore", as are classes named ``ignore...`` or ``exclude...``. ``class_map`` gives the names.

    Args:
        known: classes of a model that the annotations are compared with, which may lack some or all of them; None: a
            training learns what is drawn.

    Raises:
        ValueError: no file can be read, nothing is drawn in any of them to learn, or ids have no name. Or the class map
            lists what is not drawn, or its ``*`` takes another spelling of a listed name.
    """
    cache = AnnotationCache()
    slides = sorted(files.path)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        read = pool.map(lambda slide: _contents(cache, files.path[slide], class_map), slides)
        of_slides = dict(zip(slides, read, strict=True))
    failed = {slide: str(content) for slide, content in of_slides.items() if isinstance(content, SlideError)}
    contents = {slide: content for slide, content in of_slides.items() if not isinstance(content, SlideError)}
    names = {name for content in contents.values() for name in content.names}
    values = {slide: content.values for slide, content in contents.items() if content.values is not None}
    boxes = {slide: content.box for slide, content in contents.items() if content.box is not None}
    hidden = {slide: content.hidden for slide, content in contents.items() if content.hidden}
    without_area = sum(content.without_area for content in contents.values())
    digests = "".join(f"{slide} {content.digest}\n" for slide, content in contents.items())
    if len(failed) == len(slides):
        raise ValueError(f"{files.source}: no annotation can be read; the first: {failed[slides[0]]}")
    of_model = {value for value in range(1, IGNORE) if class_map.learned(f"class_{value}") in (known or ())}
    present = set().union(*values.values()) - {0}
    if present == {IGNORE} and class_map.learned(UNNAMED_CLASS) in (known or ()):
        of_model = set()  # 255 is the class, as in training: it has no number, whatever names the map joins
    numbered = {value: f"class_{value}" for value in sorted(of_model | present - {IGNORE})} if of_model else {}
    mask_names = mask_classes(values, files, folder_names(files) or numbered)
    check = class_map.check if known is None else class_map.check_others
    check(names | set(mask_names.values()))
    mask_names = {value: class_map.learned(mask_names[value]) for value in sorted(mask_names)}
    drawn = sorted(set(map(class_map.learned, names)))
    classes = (BACKGROUND, *filter(is_learned, dict.fromkeys([*mask_names.values(), *drawn])))
    if not (2 if known is None or without_area else 1) <= len(classes) < IGNORE:
        raise ValueError(
            f"{files.source}: the {len(slides) - len(failed)} files that can be read must draw between 1 and "
            f"{IGNORE - 2} classes; they draw {len(classes) - 1}"
            + (f" (and {without_area} points or lines)" if without_area else "")
        )
    unlabelled = tuple(sorted(spec.slide_id for spec in specs if spec.slide_id not in files.path))
    _log(files, failed, unlabelled, without_area)
    visible = {
        slide: content.visible.union(mask_names[value] for value in content.values or () if value in mask_names)
        for slide, content in contents.items()
    }
    seen = set().union(*visible.values())
    _log_hidden(files.source, hidden, [name for name in classes[1:] if name not in seen])
    return SlideAnnotations(
        classes,
        {slide: patient[slide] for slide in slides if slide in patient and slide not in failed},
        files.source,
        {slide: files.path[slide] for slide in slides if slide not in failed},
        {value: class_id(name, classes) for value, name in mask_names.items()},
        class_map,
        failed,
        unlabelled,
        {slide: name for slide, name in (site or {}).items() if slide in files.path and slide not in failed},
        boxes,
        hashlib.blake2b(digests.encode(), digest_size=16).hexdigest(),
        visible,
        cache,
    )


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of a file, and a digest of its bytes."""

    digest: str
    names: set[str]
    visible: set[str]
    without_area: int = 0
    values: set[int] | None = None
    box: Box | None = None
    hidden: Counter[str] = field(default_factory=Counter)


def _contents(cache: AnnotationCache, path: Path, class_map: ClassMap) -> _Content | SlideError:
    """Return what a file holds, or what is wrong with it."""
    try:
        with damaged_is_slide_error(path):
            annotation = cache.get(path)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "blake2b").hexdigest()
            if isinstance(annotation, PolygonSet):
                if len(annotation.classes) >= IGNORE:
                    raise SlideError(f"annotation {path} draws {len(annotation.classes)} classes, above {IGNORE - 2}")
                return _of_drawing(annotation, class_map, digest)
            values = annotation.values()
            if annotation.names:
                names = {printable_name(annotation.names[value]) for value in values - {0}}
                return _Content(digest, names, set(map(class_map.learned, names)))
            if odd := [value for value in sorted(values) if not 0 <= value <= IGNORE]:
                raise SlideError(f"mask {path} has the value {odd[0]}; class ids are 0 to {IGNORE}. Is it a mask?")
            return _Content(digest, set(), set(), values=values)
    except SlideError as fault:
        return fault


def _of_drawing(drawing: PolygonSet, class_map: ClassMap, digest: str) -> _Content:
    learned = list(map(class_map.learned, drawing.classes))
    number = {name: k for k, name in enumerate(dict.fromkeys(learned))}
    group = np.array([number[name] for name in learned], np.int32)[drawing.polygon_class]
    without_area = sum(drawing.left_out.values())
    if not len(group):
        return _Content(digest, set(), set(), without_area)
    covered = painted_over(drawing, group)
    box = (*drawing.box[:, :2].min(axis=0).tolist(), *drawing.box[:, 2:].max(axis=0).tolist())
    seen = ~covered & (areas_within(drawing, *box) > 0)
    names = list(number)
    hidden = Counter(names[k] for k in group[covered].tolist() if is_learned(names[k]))
    visible = {names[k] for k in np.unique(group[seen]).tolist()}
    return _Content(digest, set(drawing.classes), visible, without_area, box=box, hidden=hidden)


def _log_hidden(source: str, hidden: Mapping[str, Counter[str]], unseen: Sequence[str]) -> None:
    told = [
        f"{slide} ({', '.join(f'{count} {name}' for name, count in sorted(of_slide.items()))})"
        for slide, of_slide in sorted(hidden.items())
    ]
    for line in told:
        logger.info("%s: completely painted over by later areas: %s", source, line)
    if told:
        total = sum(of_slide.total() for of_slide in hidden.values())
        logger.warning("%s: %d areas are completely painted over by later ones: %s", source, total, listed(told))
    if unseen:
        logger.warning(
            "%s: classes without a pixel on any slide: %s; they are never learned. Draw small areas after the large "
            "ones that hold them, or take the class out",
            *(source, listed(unseen)),
        )


def _log(files: AnnotationFiles, failed: Mapping[str, str], unlabelled: Sequence[str], without_area: int) -> None:
    for fault in failed.values():
        logger.warning("left out: %s", fault)
    warn_of(logger, f"{files.source}: left out, without an annotation", unlabelled, "slide")
    names = [path.name for path in files.unknown]
    warn_of(logger, f"{files.source}: for slides that are not there", names, "file")
    if without_area:
        logger.warning("%s: %d points, lines and empty features have no area: not used", files.source, without_area)
