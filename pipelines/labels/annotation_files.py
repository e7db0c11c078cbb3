"""Annotation files of slides: found by name, read, and kept while their slides are in use.

A file belongs to the slide of its stem: ``x.geojson``, ``x.svs.geojson``, ``x.xml`` and ``x_mask.tif`` belong to slide
``x``; a DICOM Segmentation of another name to the slide whose series it was made of. Of several kinds for one slide
GeoJSON goes before a mask, and both before ``.xml`` and ``.json``, which also hold other things.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from pipelines.backends.dicom_head import is_segmentation, series_uid, source_series
from pipelines.backends.mask import Mask, open_mask
from pipelines.catalog.catalog import (
    MASK_ENDINGS,
    PREDICTIONS_FILE,
    SlideNames,
    SlideSpec,
    is_mask_name,
    slide_stem,
    walk_folders,
)
from pipelines.catalog.table import counted, listed
from pipelines.labels.annotation_xml import read_xml
from pipelines.labels.class_names import IGNORE, IGNORED_CLASS
from pipelines.labels.drawing import BACKGROUND, UNNAMED_CLASS, PolygonSet, printable_name
from pipelines.labels.geojson import read_geojson
from pipelines.slides.slide import SlideError

logger = logging.getLogger(__name__)

XML_SUFFIX = ".xml"
DRAWING_SUFFIXES = (".geojson", ".json", XML_SUFFIX)
MASK_SUFFIXES = (".tif", ".tiff", ".png")
SEG_SUFFIX = ".dcm"
"""Of DICOM Segmentations, masks that name their classes; of slides, too."""

RASTER_SUFFIXES = (*MASK_SUFFIXES, SEG_SUFFIX)
RANK = {".geojson": 0} | dict.fromkeys(RASTER_SUFFIXES, 1) | {XML_SUFFIX: 2, ".json": 3}

CLASSES_FILE = "classes.txt"
"""Names the class ids of the masks in its folder."""

CLASS_LINE = re.compile(r"([0-9]{1,9})[\s:=,;]+(\S.*)")

BESIDE_FOLDERS = ("annotations", "masks")


@dataclass(frozen=True, slots=True)
class AnnotationFiles:
    """Annotation files and the slides they belong to."""

    path: Mapping[str, Path]
    unknown: tuple[Path, ...]
    source: str


def annotations_in(folder: Path, specs: Sequence[SlideSpec]) -> AnnotationFiles:
    """Return the annotation files of ``folder``, sub-folders included.

    Raises:
        ValueError: no folder, no file in it belongs to a slide, or two of one kind belong to the same.
    """
    if not folder.is_dir():
        raise ValueError(f"--annotations must be a folder of annotation files; {folder} is none. Check the path")
    files = _assign(files_below(folder), specs, str(folder))
    if not files.path:
        others = any(not is_segmentation(file) for file in folder.rglob("*.dcm"))
        raise ValueError(
            f"--annotations {folder} holds nothing for the slides: looked, sub-folders included, for <slide>.geojson, "
            f"<slide>.xml, <slide>.json, <slide>.tif, <slide>.png and DICOM SEG <slide>.dcm, "
            f"for example {specs[0].slide_id}.geojson. "
            + (f"Found annotations for {listed([f.stem for f in files.unknown])}. " if files.unknown else "")
            + ("Other .dcm files are no segmentations (SEG): not read. " if others else "")
            + "Name the files after the slides"
        )
    return files


def annotations_beside(root: Path, specs: Sequence[SlideSpec]) -> AnnotationFiles | None:
    """Annotation files next to the slides: siblings, and ``annotations/`` and ``masks/`` in their folder or ``root``.

    None where there are none. Raises ValueError where two of one kind belong to the same slide.
    """
    slides = {spec.path for spec in specs}
    files: list[Path] = []
    for folder in sorted({spec.path.parent for spec in specs} | {root}):
        is_predicted = (folder / PREDICTIONS_FILE).is_file()
        for path in folder.iterdir() if folder.is_dir() else ():
            # A picture beside a slide is a slide itself unless its name says mask.
            is_picture = path.suffix.lower() in MASK_SUFFIXES and not is_mask_name(slide_stem(path.name))
            if path.name.lower() in BESIDE_FOLDERS:
                if not (is_predicted and path.name == "masks"):  # those of app.predict
                    files += files_below(path)
            elif path not in slides and not is_picture and _is_annotation(path):
                files.append(path)
    assigned = _assign(files, specs, f"annotations beside the slides of {root}")
    return assigned if assigned.path else None


def slides_of(files: Iterable[Path], specs: Sequence[SlideSpec]) -> dict[Path, SlideSpec]:
    """Return the slide of each file that has one: by its name, of a DICOM Segmentation else by its source."""
    names = SlideNames(spec.slide_id for spec in specs)
    by_id = {spec.slide_id: spec for spec in specs}
    slides: dict[Path, SlideSpec] = {}
    by_series: dict[str, SlideSpec] | None = None
    for file in files:
        slide = next((s for name in _names(file) if (s := names.match(name)) is not None), None)
        if slide is not None:
            slides[file] = by_id[slide]
        elif file.suffix.lower() == SEG_SUFFIX:
            if by_series is None:
                by_series = {series_uid(spec.path): spec for spec in specs if spec.path.suffix.lower() == SEG_SUFFIX}
            sources = [by_series[series] for series in sorted(source_series(file)) if series in by_series]
            if len(sources) == 1:
                slides[file] = sources[0]
    return slides


def _assign(files: Iterable[Path], specs: Sequence[SlideSpec], source: str) -> AnnotationFiles:
    files = sorted(set(files))
    slides = slides_of(files, specs)
    by_slide: defaultdict[str, list[Path]] = defaultdict(list)
    unknown: list[Path] = []
    for file in files:
        if file in slides:
            by_slide[slides[file].slide_id].append(file)
        elif file.suffix.lower() not in (XML_SUFFIX, ".json"):
            unknown.append(file)
    path: dict[str, Path] = {}
    faults: list[str] = []
    for slide, candidates in by_slide.items():
        best = min(RANK[f.suffix.lower()] for f in candidates)
        same = [f for f in candidates if RANK[f.suffix.lower()] == best]
        path[slide] = same[0]
        if len(same) > 1:
            faults.append(f"slide {slide!r} has {' and '.join(map(str, same))}")
    if faults:
        raise ValueError(f"{source}: a slide has one annotation file; " + "\n  ".join(faults) + "\nkeep one of them")
    return AnnotationFiles(path, tuple(unknown), source)


def _names(file: Path) -> Iterator[str]:
    """Names that the file may give its slide, the closest first: ``x.svs_mask.tif`` gives x.svs_mask, then x.svs."""
    stem = slide_stem(file.name) if file.suffix.lower() in RASTER_SUFFIXES else file.stem
    yield stem
    for ending in MASK_ENDINGS:
        if stem.lower().endswith(ending):
            yield stem[: -len(ending)]


def _is_annotation(file: Path) -> bool:
    suffix = file.suffix.lower()
    if suffix not in RANK or file.name.startswith(".") or not file.is_file():
        return False
    return suffix != SEG_SUFFIX or is_segmentation(file)


def files_below(folder: Path) -> list[Path]:
    """Return the files of ``folder`` and its sub-folders that may be annotations, in no order."""
    return [file for below, _, names in walk_folders(folder) for name in names if _is_annotation(file := below / name)]


FILES, TOTAL_BYTES = 512, 512 << 20
"""Kept files, more than slides are open at once, as each mask holds a file of its own open; and their memory."""


@contextlib.contextmanager
def damaged_is_slide_error(path: Path) -> Iterator[None]:
    """Whatever is raised inside is the fault of the file: of a damaged one, libraries raise anything."""
    try:
        yield
    except SlideError:
        raise
    except Exception as fault:
        text = f"{type(fault).__name__}: {fault}".strip(": ")
        raise SlideError(f"annotation {path} is damaged ({text}). Export it again") from fault


FILE_BYTES = 2 << 30
"""Largest drawing that is read: parsed, it takes about ten times as much."""


def read_annotation(path: Path) -> PolygonSet | Mask:
    """Return what a file of annotations holds, by its suffix. Raises SlideError where it cannot be read."""
    suffix = path.suffix.lower()
    if suffix in RASTER_SUFFIXES:
        return open_mask(path)
    try:
        if path.stat().st_size > FILE_BYTES:
            raise SlideError(f"annotation {path} is larger than {FILE_BYTES >> 30} GiB: leave out what is not drawn")
        return read_xml(path) if suffix == XML_SUFFIX else read_geojson(path)
    except OSError as fault:
        raise SlideError(f"annotation {path} cannot be read: {fault.strerror or fault}") from fault


class AnnotationCache:
    """The contents of so many files, of so many bytes together; the latest is kept whatever its size. Safe in many
    threads; two threads that need the same file read it once."""

    def __init__(self, files: int = FILES, total_bytes: int = TOTAL_BYTES) -> None:
        self._files, self._total_bytes = files, total_bytes
        self._lock = Lock()
        self._kept: OrderedDict[Path, PolygonSet | Mask] = OrderedDict()
        self._reading: defaultdict[Path, Lock] = defaultdict(Lock)

    def get(self, path: Path) -> PolygonSet | Mask:
        """Return the annotation in ``path``. Raises SlideError where it is damaged, however that shows."""
        with self._lock:
            reading = self._reading[path]
        with reading:
            with self._lock:
                if path in self._kept:
                    self._kept.move_to_end(path)
                    return self._kept[path]
            with damaged_is_slide_error(path):
                annotation = read_annotation(path)
            with self._lock:
                self._kept[path] = annotation
                kept_bytes = sum(kept.nbytes for kept in self._kept.values())
                while len(self._kept) > 1 and (len(self._kept) > self._files or kept_bytes > self._total_bytes):
                    # a mask's file is closed when the last thread that reads from it drops it
                    kept_bytes -= self._kept.popitem(last=False)[1].nbytes
            return annotation

    def __reduce__(self) -> tuple[type[AnnotationCache], tuple[int, int]]:
        return AnnotationCache, (self._files, self._total_bytes)


def folder_names(files: AnnotationFiles) -> dict[int, str]:
    """Return class names by id from ``classes.txt`` in the folders of the masks. Raises ValueError as `named_ids`."""
    folders = {path.parent for path in files.path.values() if path.suffix.lower() in MASK_SUFFIXES}
    return named_ids(sorted(path for folder in folders if (path := folder / CLASSES_FILE).is_file()))


def mask_classes(values: Mapping[str, set[int]], files: AnnotationFiles, named: Mapping[int, str]) -> dict[int, str]:
    """Return the class name by mask value, given the values in the mask of each slide.

    Args:
        named: names by id; empty: there are none, and the ids are numbered.

    Raises:
        ValueError: ids without a name; or, without ``named``, 255 is the only value of some masks, and others have ids
            and no 255.
    """
    if not values:
        return {}
    present = set().union(*values.values()) - {0}
    classes_path = min(files.path[slide].parent for slide in values) / CLASSES_FILE
    of_255 = [slide for slide, of_slide in sorted(values.items()) if of_slide - {0} == {IGNORE}]
    of_ids = [slide for slide, of_slide in sorted(values.items()) if of_slide - {0, IGNORE}]
    if not named and of_255 and of_ids and not any(IGNORE in values[slide] for slide in of_ids):
        raise ValueError(
            f"{files.source}: {IGNORE} is the only value besides 0 in {counted(len(of_255), 'mask')} "
            f"({listed([str(files.path[slide]) for slide in of_255])}), and no mask with class ids has it, as "
            f"{files.path[of_ids[0]]}. If pixels of {IGNORE} shall be ignored, name the ids in {classes_path}, a "
            f"line `1 {UNNAMED_CLASS}` for each; if they are a class, export all masks with the same values"
        )
    if not named and present <= {1, IGNORE} and present:
        return {min(present): UNNAMED_CLASS}
    classes = dict(named) or {value: f"class_{value}" for value in range(1, len(present - {IGNORE}) + 1)}
    faults = [
        f"{files.path[slide]} has {listed([str(v) for v in sorted(odd)])}"
        for slide, of_slide in sorted(values.items())
        if (odd := of_slide - {0, IGNORE} - set(classes))
    ]
    if faults:
        raise ValueError(
            f"{files.source}: mask values are class ids, {', '.join(f'{v} {n}' for v, n in classes.items())}, "
            f"0 for background and {IGNORE} for ignore; " + "\n  ".join(faults[:8]) + "\n"
            f"Name the ids in {classes_path}, a line `1 tumour` for each"
        )
    return classes


def named_ids(paths: Sequence[Path]) -> dict[int, str]:
    """Return class names by id from ``classes.txt`` files; 0 and ``IGNORE`` are no classes.

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
            value, name = int(match[1]), printable_name(match[2])
            if value in (0, IGNORE) and name.casefold() != BACKGROUND and not IGNORED_CLASS.match(name):
                what = "ignored" if value else "background"
                logger.warning("%s line %d: pixels of %d are %s: %s is not learned", path, number, value, what, name)
            if value not in (0, IGNORE) and named.setdefault(value, name) != name:
                raise ValueError(
                    f"{path} line {number}: id {value} is {name!r} here and {named[value]!r} before; keep one"
                )
    return named
