"""The slides of a folder: which files are slides, and what each is called.

Takes a folder and the user's overrides (mpp, backend), gives one ``SlideSpec`` per slide, sorted by id. Nothing is
opened: a damaged file, or a text file named ``.svs``, stays a candidate and fails where it is first read, alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path

from pipelines.geometry import MPP_MAX, MPP_MIN, check_mpp
from pipelines.slide import Slide

FILE_SUFFIXES = frozenset(
    {".svs", ".tif", ".tiff", ".btf", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu"}
    | {".svslide", ".dcm", ".png", ".jpg", ".jpeg"}
)
"""A file with one of these, in any case, is taken for a slide."""

FOLDER_SUFFIX = ".zarr"
"""A folder that ends like this is one slide."""

SKIPPED_FOLDERS = frozenset({"annotations", "masks", "tissue"})
"""Folders that hold pictures of slides, not slides; ``tissue`` is what a run folder calls its overlays."""

MASK_ENDINGS = ("_mask", "-mask")

HAMAMATSU_INDEXES = frozenset({".vms", ".vmu"})
"""Text files that name the JPEG files which are their slide's pixels."""

HEAD_BYTES = 256 << 10
"""As much of a file as is looked at: a whole VMS file; of a DICOM file what stands before the pixels."""


@dataclass(frozen=True, slots=True)
class SlideSpec:
    """How to open one slide. Small and picklable: it travels to worker processes, an open slide does not.

    Attributes:
        slide_id: file stem (``x`` for ``x.svs``, ``x.ome.tif`` and ``x.ome.zarr``); unique in a catalog.
        path: file, or folder of a Zarr slide.
        mpp: um/px of level 0, in place of what the file says; None: what the file says.
        backend: auto, tiled, openslide, zarr or image.
    """

    slide_id: str
    path: Path
    mpp: float | None = None
    backend: str = "auto"

    def open(self) -> Slide:
        """The open slide, to be closed by the caller. Raises what ``open_slide`` raises."""
        from pipelines.slide import open_slide  # here, so that listing a folder loads no slide library

        return open_slide(self.path, mpp=self.mpp, backend=self.backend)


def slide_stem(name: str) -> str:
    """The slide id that a file name stands for: the name without its slide suffix and without ``.ome``.

    >>> slide_stem("case.7.ome.tif"), slide_stem("case.7.svs"), slide_stem("case.7")
    ('case.7', 'case.7', 'case.7')
    """
    stem, suffix = os.path.splitext(name)
    if suffix.lower() not in FILE_SUFFIXES and suffix.lower() != FOLDER_SUFFIX:
        return name
    return stem[:-4] if stem.lower().endswith(".ome") else stem


def match_slide(name: str, ids: Iterable[str]) -> str | None:
    """The id among ``ids`` that a name in a table means, or None.

    A path or a file extension in the name is tolerated. Upper and lower case count first; a name that fits a single id
    without them is that one.
    """
    known = ids if isinstance(ids, Set) else set(ids)
    base = name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    for exact in (name, base, slide_stem(base)):
        if exact in known:
            return exact
    folded = [s for s in known if s.casefold() in (base.casefold(), slide_stem(base).casefold())]
    return folded[0] if len(folded) == 1 else None


def find_slides(
    root: Path,
    *,
    mpp: float | None = None,
    mpp_by_slide: Mapping[str, float] | None = None,
    backend: str = "auto",
) -> tuple[SlideSpec, ...]:
    """All slides under ``root``, sub-folders included, sorted by id.

    Not slides: hidden files, folders in ``SKIPPED_FOLDERS``, files that end in ``_mask`` or ``-mask``, the data
    folder of an MRXS slide, the JPEG files of a VMS slide. The DICOM files of one folder and one series are one slide:
    its file is the largest of them (the finest level; OpenSlide finds the others), its id the folder's name, or that
    file's stem where the folder holds several series.

    Args:
        root: folder.
        mpp: um/px of level 0 for every slide, in place of what the files say.
        mpp_by_slide: the same for single slides, by name as ``match_slide`` takes it; goes before ``mpp``.
        backend: handed to ``open_slide``.

    Raises:
        ValueError: ``root`` is no folder or holds no slide, two slides have one id, or an mpp is implausible.
    """
    named = mpp_by_slide or {}
    for where, value in [("--slide-mpp", mpp), *((f"the mpp of slide {s!r}", v) for s, v in named.items())]:
        if value is not None and not check_mpp(value):
            raise ValueError(f"{where} must be between {MPP_MIN:g} and {MPP_MAX:g} um/px; got {value:g}")
    _check_folder(root)
    paths: dict[str, Path] = {}
    twice: list[str] = []
    for slide_id, path in _candidates(root):
        if slide_id in paths:
            twice.append(f"  {slide_id!r}: {paths[slide_id]} and {path}")
        else:
            paths[slide_id] = path
    if twice:
        listed = "\n".join(sorted(twice))
        raise ValueError(
            f"the file stem is the slide's name and must be unique under --slides {root}; found\n{listed}\n"
            "rename one of each, or move the copies out of the folder"
        )
    if not paths:
        raise ValueError(
            f"--slides {root} holds no slide: looked, sub-folders included, for {' '.join(sorted(FILE_SUFFIXES))} "
            f"files and {FOLDER_SUFFIX} folders; folders named {', '.join(sorted(SKIPPED_FOLDERS))} and files ending "
            "in _mask are taken for annotations. Give the folder that holds the slides"
        )
    overrides = {match_slide(name, paths.keys()): value for name, value in named.items()}
    return tuple(SlideSpec(s, paths[s], overrides.get(s, mpp), backend) for s in sorted(paths))


def _check_folder(root: Path) -> None:
    if not root.exists():
        raise ValueError(f"--slides must be a folder of slides; {root} does not exist. Check the path")
    if not root.is_dir():
        raise ValueError(f"--slides must be a folder of slides; {root} is a file. Give its folder, {root.parent}")
    if root.suffix.lower() == FOLDER_SUFFIX:
        raise ValueError(f"--slides must be a folder of slides; {root} is one slide. Give its folder, {root.parent}")


def _candidates(root: Path) -> Iterator[tuple[str, Path]]:
    """(slide id, path) of every slide under ``root``, in a fixed order."""
    seen: set[str] = set()  # links to folders are followed, a loop of them once
    for folder_name, folders, files in os.walk(root, followlinks=True):
        folder = Path(folder_name)
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        names = sorted(f for f in files if _is_slide_name(f))
        yield from ((slide_stem(f), folder / f) for f in sorted(folders) if _is_zarr(f))
        mrxs_data = {slide_stem(f) for f in names if f.lower().endswith(".mrxs")}
        folders[:] = sorted(
            f
            for f in folders
            if not f.startswith(".")
            and not f.lower().endswith(FOLDER_SUFFIX)
            and f.lower() not in SKIPPED_FOLDERS
            and f not in mrxs_data
        )
        parts = _hamamatsu_parts(folder, names)
        dicom = [f for f in names if f.lower().endswith(".dcm")]
        yield from ((slide_stem(f), folder / f) for f in names if f not in parts and f not in dicom)
        yield from _dicom_slides(folder, dicom)


def _is_slide_name(name: str) -> bool:
    stem, suffix = os.path.splitext(name)
    return suffix.lower() in FILE_SUFFIXES and not name.startswith(".") and not is_mask_name(stem)


def _is_zarr(name: str) -> bool:
    return name.lower().endswith(FOLDER_SUFFIX) and not name.startswith(".") and not is_mask_name(slide_stem(name))


def is_mask_name(stem: str) -> bool:
    """True when a file stem says that the file is a mask of another one."""
    return stem.lower().removesuffix(".ome").endswith(MASK_ENDINGS)


def _hamamatsu_parts(folder: Path, names: list[str]) -> set[str]:
    """The files of ``names`` that a VMS or VMU file of the same folder names as its pixels."""
    indexes = [f for f in names if os.path.splitext(f)[1].lower() in HAMAMATSU_INDEXES]
    text = b"\n".join(_head(folder / f) for f in indexes).decode("utf-8", "replace")
    values = {line.partition("=")[2].strip() for line in text.splitlines()}
    return values.intersection(names)


def _dicom_slides(folder: Path, names: list[str]) -> Iterator[tuple[str, Path]]:
    """(slide id, path) for each DICOM series among ``names``; a file whose series is not found stands for itself."""
    series: dict[bytes, list[Path]] = {}
    for name in names:
        path = folder / name
        series.setdefault(_series_uid(path) or os.fsencode(name), []).append(path)
    for files in series.values():
        largest = max(files, key=lambda path: (path.stat().st_size, path.name))
        named_after_folder = len(files) > 1 and len(series) == 1
        yield (folder.resolve().name if named_after_folder else slide_stem(largest.name)), largest


def _series_uid(path: Path) -> bytes | None:
    """SeriesInstanceUID (0020,000E) of a little-endian DICOM file, explicit or implicit (DICOM PS3.5, section 7.1)."""
    head = _head(path)
    at = head.find(b"\x20\x00\x0e\x00")
    if head[128:132] != b"DICM" or at < 0:
        return None
    length = int.from_bytes(
        head[at + 6 : at + 8] if head[at + 4 : at + 6] == b"UI" else head[at + 4 : at + 8], "little"
    )
    return head[at + 8 : at + 8 + length].rstrip(b"\0 ")


def _head(path: Path) -> bytes:
    """The first ``HEAD_BYTES`` of a file; none of one that cannot be read: that fails when it is opened as a slide."""
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError:
        return b""
