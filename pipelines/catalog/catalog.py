"""The slides of a folder: which files are slides, and what each is called.

Takes a folder and the user's overrides (mpp, backend), gives one ``SlideSpec`` per slide, sorted by id. Nothing is
opened: a damaged file, or a text file named ``.svs``, stays a candidate and fails where it is first read, alone.
"""

from __future__ import annotations

import contextlib
import os
import stat
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.backends.dicom_head import is_segmentation, series_uid
from pipelines.catalog.handles import HAMAMATSU_INDEXES, SlideState, hamamatsu_parts
from pipelines.catalog.table import LABELS_FILE, read_table, read_text
from pipelines.slides.geometry import mpp_fault
from pipelines.slides.slide import Slide, SlideError, printable, url_of, url_path

FILE_SUFFIXES = frozenset(
    {".svs", ".qptiff", ".tif", ".tiff", ".btf", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu"}
    | {".svslide", ".dcm", ".png", ".jpg", ".jpeg", ".bmp"}
)
"""Of slides, in any case."""

PICTURE_SUFFIXES, PICTURE_MPP = frozenset({".png", ".jpg", ".jpeg", ".bmp"}), 0.5
"""Files that record no um/px, and that of pictures resized as a whole, where it changes nothing."""

UNREAD_PICTURES = frozenset({".gif", ".webp", ".heic", ".avif", ".jp2", ".jfif"})
"""Pictures that are not read: among pictures that are, slides that fail when they are opened."""

FOLDER_SUFFIX, SKIPPED_FOLDERS = ".zarr", frozenset({"annotations", "masks"})
"""A folder that ends so is one slide; folders that hold no slides."""

TISSUE_FOLDER, INDEX_FILES = "tissue", ("run.log", "tiles.parquet", "tiles.part-")
"""Folder of pictures of an index or a run, and how names of files beside it begin. Elsewhere it may be a class."""

PREDICTIONS_FILE, PREDICTED_PICTURES = "predict.json", frozenset({"heat_maps", "overlays"})
"""File in a folder that ``app.predict`` wrote, and its sub-folders with pictures, which are not slides."""

QUPATH_PROJECT, MASK_ENDINGS = ".qpproj", ("_mask", "-mask")
"""Suffix of a QuPath project, whose thumbnails are in ``data/1``, ``data/2``, ... beside it; ends of stems of masks."""


@dataclass(frozen=True, slots=True)
class SlideSpec:
    """Recipe to open one slide. Small and picklable: it travels to worker processes, an open slide does not.

    Attributes:
        slide_id: file stem (``x`` for ``x.svs``, ``x.ome.tif`` and ``x.ome.zarr``); unique in a catalog.
        path: file, folder of a Zarr slide, or what ``url_path`` makes of the URL of one.
        mpp: um/px of level 0, in place of what the file says; None: what the file says.
        backend: auto, tiled, ndpi, openslide, zarr or image.
        state: of the file when it was indexed; None: not compared.
        scene: which image to read if the file holds several of similar size, counted from 0.
    """

    slide_id: str
    path: Path
    mpp: float | None = None
    backend: str = "auto"
    state: SlideState | None = None
    scene: int | None = None

    def verify_unchanged(self) -> None:
        """Raise SlideError if the slide was replaced since it was indexed: its tiles may lie elsewhere, or be none."""
        if self.state is not None and not self.state.is_of(self.path):
            raise SlideError(
                f"{self.path}: this is not the slide that was indexed: it was replaced, changed or taken away since; "
                "put the file back, or index anew in another --out"
            )

    def open(self) -> Slide:
        """Open the slide, which the caller closes; raises SlideError as ``open_slide`` does."""
        if self.path.suffix.lower() in UNREAD_PICTURES and url_of(self.path) is None:
            raise SlideError(f"{self.path}: pictures of type {self.path.suffix} are not read; save it as PNG")
        from pipelines.backends.registry import open_slide  # here, so that listing a folder loads no slide library

        return open_slide(self.path, mpp=self.mpp, backend=self.backend, scene=self.scene)


def slide_stem(name: str) -> str:
    """Return the slide id that a file name stands for: the name without its slide suffix and without ``.ome``."""
    stem, suffix = os.path.splitext(name)
    if suffix.lower() not in FILE_SUFFIXES and suffix.lower() != FOLDER_SUFFIX:
        return name
    return stem[:-4] if stem.lower().endswith(".ome") else stem


def _folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold().strip()


class SlideNames:
    """Slides by the names in a table; a name costs the same whatever the number of slides."""

    def __init__(self, ids: Iterable[str]) -> None:
        self._known = frozenset(ids)
        self._folded: defaultdict[str, set[str]] = defaultdict(set)
        for slide_id in self._known:
            self._folded[_folded(slide_id)].add(slide_id)

    def match(self, name: str) -> str | None:
        """Return the slide id that ``name`` means, a path or file extension in it tolerated, or None.

        Upper and lower case, blanks at the ends and the Unicode form count first; a name that fits a single id without
        them is that one. Tables lose these blanks, and a Mac decomposes the umlauts of file names.
        """
        base = name.replace("\\", "/").rstrip("/").rpartition("/")[2]
        stem = slide_stem(base)
        short = slide_stem(f"{stem}.tif")  # x of x.ome, which other programs make of x.ome.tif
        for exact in (name, slide_stem(name), base, stem, short):
            if exact in self._known:
                return exact
        without_case = set(map(_folded, (name, base, stem, short)))
        folded = set().union(*(self._folded.get(text, ()) for text in without_case))
        return folded.pop() if len(folded) == 1 else None


def find_slides(
    root: Path,
    *,
    mpp: float | None = None,
    mpp_by_slide: Mapping[str, float] | None = None,
    whole_pictures: bool = False,
    backend: str = "auto",
    scene: int | None = None,
    labels: Path | None = None,
) -> tuple[SlideSpec, ...]:
    """Return all slides under ``root``, sub-folders included, and those that a table names by URL, sorted by id.

    Hidden files and folders in ``SKIPPED_FOLDERS`` are left out; so are masks (``_mask``, ``-mask``, DICOM
    Segmentations) and pictures of an index, of predictions and of QuPath projects. The data folder of an MRXS slide and
    the JPEG files of a VMS slide are parts of it. The DICOM files of one folder and series are one slide: its file is
    the largest of them (the finest level). Its id is the folder's name, or that file's stem where the folder holds
    several series, or the path below ``root`` where another slide has that name. A damaged DICOM file is a series of
    its own. A folder that cannot be listed is a slide of its name and a slash, which fails when it is opened.

    Args:
        mpp: um/px of level 0 for every slide, in place of what the files say.
        mpp_by_slide: the same for single slides, as ``read_mpp`` returns it; goes before ``mpp``.
        whole_pictures: a slide's id is its path below ``root``, without suffix, and um/px are not needed.
        backend, scene: handed to ``open_slide``.
        labels: CSV file whose column slide may hold URLs of OME-Zarr images; ``labels.csv`` of ``root`` by default.

    Raises:
        ValueError: ``root`` is no folder or holds no slide, two slides have one id, an mpp is implausible, or a URL
            cannot be asked for.
    """
    named = mpp_by_slide or {}
    if scene is not None and scene < 0:
        raise ValueError(f"--scene counts the images of a slide file from 0; got {scene}")
    if mpp is not None and (fault := mpp_fault(mpp)):
        raise ValueError(f"--slide-mpp {fault}")
    check_folder(root)
    paths: dict[str, Path] = {}
    twice: list[str] = []
    candidates = [*_candidates(root), *_behind_urls(labels or root / LABELS_FILE)]
    count = Counter(name for name, _ in candidates)
    for name, path in candidates:
        by_path = whole_pictures or (count[name] > 1 and _has_suffix(path.name, (".dcm",)))
        slide_id = printable(slide_stem(os.path.relpath(path, root)) if by_path else name)
        if slide_id in paths:
            twice.append(f"  {slide_id!r}: {printable(str(paths[slide_id]))} and {printable(str(path))}")
        else:
            paths[slide_id] = path
    if twice:
        listed = "\n".join(sorted(twice))
        raise ValueError(
            f"the file stem is the slide's name and must be unique under --slides {root}; found\n{listed}\n"
            "rename one of each, or move the copies out of the folder"
        )
    if not paths:
        skipped = ", ".join(sorted(SKIPPED_FOLDERS))
        raise ValueError(
            f"--slides {root} holds no slide: looked, sub-folders included, for {' '.join(sorted(FILE_SUFFIXES))} "
            f"files, {FOLDER_SUFFIX} folders, and URLs in {LABELS_FILE}; folders named {skipped} and files ending in "
            "_mask are taken for annotations. Give the folder that holds the slides"
        )
    names = SlideNames(paths)
    overrides: dict[str, float] = {}
    for name, value in named.items():
        slide = names.match(name)
        if slide is not None and overrides.setdefault(slide, value) != value:
            raise ValueError(f"slide {slide!r} has two mpp, {overrides[slide]:g} and {value:g} um/px; keep one")
    if whole_pictures and mpp is None:
        pictures = [s for s in paths if paths[s].suffix.lower() in PICTURE_SUFFIXES]
        overrides = dict.fromkeys(pictures, PICTURE_MPP) | overrides
    return tuple(SlideSpec(s, paths[s], overrides.get(s, mpp), backend, scene=scene) for s in sorted(paths))


def check_folder(root: Path) -> None:
    """Raise ValueError where ``root`` does not exist, is a file, or is one slide."""
    if not root.exists():
        raise ValueError(f"--slides must be a folder of slides; {root} does not exist. Check the path")
    if not root.is_dir():
        raise ValueError(f"--slides must be a folder of slides; {root} is a file. Give its folder, {root.parent}")
    if root.suffix.lower() == FOLDER_SUFFIX:
        raise ValueError(f"--slides must be a folder of slides; {root} is one slide. Give its folder, {root.parent}")


def walk_folders(
    root: Path, onerror: Callable[[OSError], object] | None = None
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield what ``os.walk`` does, links to folders followed; of a loop of them each folder once."""
    seen: set[str] = set()
    for folder, folders, files in os.walk(root, followlinks=True, onerror=onerror):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
        else:
            seen.add(real)
            yield Path(folder), folders, files


def _candidates(root: Path) -> Iterator[tuple[str, Path]]:
    """(slide id, path) of every slide under ``root``, in a fixed order."""
    unlisted: list[str] = []
    for folder, folders, files in walk_folders(root, lambda fault: unlisted.append(str(fault.filename))):
        names = sorted(f for f in files if _is_slide_name(f, FILE_SUFFIXES))
        yield from ((slide_stem(f), folder / f) for f in sorted(folders) if _is_slide_name(f, (FOLDER_SUFFIX,)))
        mrxs_data = {slide_stem(f) for f in names if f.lower().endswith(".mrxs")}
        folders[:] = sorted(
            f
            for f in folders
            if not f.startswith(".")
            and not f.lower().endswith(FOLDER_SUFFIX)
            and f.lower() not in SKIPPED_FOLDERS
            and f not in mrxs_data
            and not (f in PREDICTED_PICTURES and PREDICTIONS_FILE in files)
            and not (f == TISSUE_FOLDER and any(name.startswith(INDEX_FILES) for name in files))
            and not (f.isdecimal() and folder.name == "data" and _holds_qupath_project(folder.parent))
        )
        parts = _hamamatsu_parts(folder, names)
        dicom = [f for f in names if f.lower().endswith(".dcm")]
        yield from ((slide_stem(f), folder / f) for f in names if f not in parts and f not in dicom)
        if names and all(_has_suffix(f, PICTURE_SUFFIXES) for f in names):
            yield from ((f, folder / f) for f in sorted(files) if _has_suffix(f, UNREAD_PICTURES))
        yield from _dicom_slides(folder, dicom)
    yield from ((f"{os.path.relpath(folder_name, root)}/", Path(folder_name)) for folder_name in sorted(unlisted))


def _behind_urls(table: Path) -> Iterator[tuple[str, Path]]:
    """(slide id, path) of every slide that a table names by its URL."""
    urls, names_urls = dict[str, int](), table.is_file() and "://" in read_text(table)
    for row in read_table(table, ("slide",)).rows if names_urls else ():
        if "://" in row["slide"]:
            urls.setdefault(row["slide"].rstrip("/"), row.line)
    for url, line in urls.items():
        try:
            path = url_path(url)
        except ValueError as fault:
            raise ValueError(f"labels {table} line {line}: {fault}") from fault
        yield slide_stem(path.name), path


def _holds_qupath_project(folder: Path) -> bool:
    try:
        return any(name.lower().endswith(QUPATH_PROJECT) for name in os.listdir(folder))
    except OSError:
        return False


def _has_suffix(name: str, suffixes: Collection[str]) -> bool:
    return os.path.splitext(name)[1].lower() in suffixes and not name.startswith(".")


def _is_slide_name(name: str, suffixes: Collection[str]) -> bool:
    return _has_suffix(name, suffixes) and not is_mask_name(slide_stem(name))


def is_mask_name(stem: str) -> bool:
    """Return whether a file stem says that the file is a mask of another one."""
    return stem.lower().removesuffix(".ome").endswith(MASK_ENDINGS)


def _hamamatsu_parts(folder: Path, names: list[str]) -> set[str]:
    """The files of ``names`` that a VMS or VMU file of the same folder names as its pixels."""
    parts: set[str] = set()
    for name in names:
        if _has_suffix(name, HAMAMATSU_INDEXES) and _size(folder / name) >= 0:
            with contextlib.suppress(OSError):  # it fails as a slide
                parts |= hamamatsu_parts(folder / name, names)
    return parts


def _dicom_slides(folder: Path, names: list[str]) -> Iterator[tuple[str, Path]]:
    """(slide id, path) for each DICOM series among ``names``; a file whose series is not found stands for itself."""
    series: defaultdict[str, list[Path]] = defaultdict(list)
    for name in names:
        path = folder / name
        if _size(path) >= 0 and is_segmentation(path):
            continue
        if uid := series_uid(path) if _size(path) >= 0 else "":
            series[uid].append(path)
        else:
            yield slide_stem(name), path
    for files in series.values():
        largest = max(files, key=lambda path: (_size(path), path.name))
        named_after_folder = len(files) > 1 and len(series) == 1
        yield (os.path.basename(os.path.abspath(folder)) if named_after_folder else slide_stem(largest.name)), largest


def _size(path: Path) -> int:
    """Bytes of a file; -1 of what is none, such as a link that leads nowhere or a pipe."""
    try:
        status = path.stat()
    except OSError:
        return -1
    return status.st_size if stat.S_ISREG(status.st_mode) else -1
