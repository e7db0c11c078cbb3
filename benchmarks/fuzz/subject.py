"""Do with one file what a user's command does, in a process that may die: opened, described, indexed, read.

Takes a file and what its whole original gave; gives a ``Report``. The index is that of ``app.index``; the reads are
those of a training run, of every level. Annotations, masks and tables of labels go through what ``app.train`` calls.
"""

from __future__ import annotations

import resource
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.catalog import SlideSpec
from pipelines.labels.annotation_files import AnnotationFiles
from pipelines.labels.annotations import SlideAnnotations, read_annotations
from pipelines.labels.slide_labels import SlideLabels, find_labels, read_mpp_column
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Slide, SlideError, TileReadError
from pipelines.tiles.slide_index import find_tiles
from pipelines.tiles.tiling import IndexSettings

ROOT = Path(__file__).parents[2]
MPP = 0.5
"""Given for files that record none."""
SETTINGS = IndexSettings(tile=128, mpp=2.0, min_tissue=0.0)
TINY_SETTINGS = IndexSettings(tile=32, mpp=MPP, min_tissue=0.0, tissue_mpp=2.0)
"""For the DICOM slide, which has 50 x 50 px."""
READ_PX = 256
"""Side of the regions that are read of each level: its corners and its middle."""
UNRECORDED = ("png", "jpeg", "tiff-strips", "dicom")
TABLES = ("mask-tiff", "mask-png", "geojson", "asap", "imagescope", "labels")
GIB = 1 << 30


@dataclass(frozen=True)
class Report:
    """Outcome of reading a file.

    Attributes:
        fault: why it, or its first unreadable part, was refused; empty when nothing was.
        foreign: where an exception came from that is not ours to raise; empty when there was none.
        facts: backend, um/px, bounds, size of level 0; of a table, its classes: what was said of it.
        reads: pixels by what was read; None for a part that was refused by name.
        peak_bytes: of the process.
    """

    fault: str = ""
    foreign: str = ""
    backend: str = ""
    facts: tuple[object, ...] = ()
    reads: dict[str, NDArray[np.uint8] | None] = field(default_factory=dict)
    peak_bytes: int = 0

    @property
    def is_refused(self) -> bool:
        return not self.reads


def take(format_name: str, path: Path) -> Report:
    """All that a command does with ``path``, which is a file of this format."""
    found: dict[str, NDArray[np.uint8] | None] = {}
    facts: list[object] = []
    fault = foreign = ""
    try:
        if format_name in TABLES:
            _take_table(format_name, path, found, facts)
        else:
            fault = _take_slide(format_name, path, found, facts)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
        if not is_own(error):
            frame = traceback.extract_tb(error.__traceback__)[-1]
            foreign = f"{fault.splitlines()[0][:160]} ({Path(frame.filename).name}:{frame.lineno}; {_ours(error)})"
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    backend = str(facts[0]) if facts else ""
    return Report(fault, foreign, backend, tuple(facts), found, peak_bytes)


def is_own(error: BaseException) -> bool:
    """True for the project's own classes, and for a ``ValueError`` that a line of the project raises in words."""
    if isinstance(error, SlideError):
        return True
    frame = traceback.extract_tb(error.__traceback__)[-1]
    within = Path(frame.filename).is_relative_to(ROOT / "pipelines") or Path(frame.filename).is_relative_to(
        ROOT / "app"
    )
    return isinstance(error, ValueError) and within and (frame.line or "").startswith("raise ")


def _ours(error: BaseException) -> str:
    """The innermost line of the project."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{ROOT / 'pipelines'}" in f.filename]
    return f"{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}" if frames else "not in pipelines"


def _take_slide(format_name: str, path: Path, found: dict[str, NDArray[np.uint8] | None], facts: list[object]) -> str:
    spec = SlideSpec("s", path, MPP if format_name in UNRECORDED else None)
    fault = ""
    with spec.open() as slide:
        first = slide.levels[0]
        facts += [slide.backend, round(float(slide.mpp), 6), slide.bounds, (first.width, first.height)]
    tiles = find_tiles(spec, TINY_SETTINGS if format_name == "dicom" else SETTINGS, 1)
    if tiles.unreadable_share:
        fault, found["overview"] = f"{tiles.unreadable_share:.1%} of the slide is damaged", None
    with spec.open() as slide:
        for name, region in regions(slide):
            try:
                found[name] = slide.read(region)
            except TileReadError as error:
                fault, found[name] = fault or str(error), None
    return fault


def regions(slide: Slide) -> list[tuple[str, Region]]:
    """Corners and middle of every level, named ``WIDTHxHEIGHT:X,Y`` after the level's size, in its px."""
    named = []
    for level in slide.levels:
        width, height = min(READ_PX, level.width), min(READ_PX, level.height)
        right, bottom = level.width - width, level.height - height
        places = {(0, 0), (right, 0), (0, bottom), (right, bottom), (right // 2, bottom // 2)}
        for x, y in sorted(places):
            l0_x, l0_y = round(x * level.downsample), round(y * level.downsample)
            named.append((f"{level.width}x{level.height}:{x},{y}", Region(l0_x, l0_y, width, height, level.mpp)))
    return named


def _take_table(format_name: str, path: Path, found: dict[str, NDArray[np.uint8] | None], facts: list[object]) -> None:
    if format_name == "labels":
        specs = [SlideSpec(f"s{k}", path.parent / f"s{k}.svs") for k in range(6)]
        mpps = read_mpp_column(path)
        labels = find_labels(path.parent, specs, labels=path)
        assert isinstance(labels, SlideLabels)
        facts += ["labels", labels.classes, sorted(labels.label.items()), sorted(labels.patient.items()), repr(mpps)]
        found["labels"] = np.array(sorted(labels.label.values()), np.uint8)
        return
    specs = [SlideSpec("m", path.with_name("m.svs"))]
    annotations = read_annotations(AnnotationFiles({"m": path}, (), "the fuzz command"), specs, {"m": "m"})
    facts += ["annotations", annotations.classes]
    mask = np.zeros((256, 384), np.uint8)
    annotations.read_mask("m", _Blank(), Region(0, 0, 384, 256, 2 * MPP), mask)
    assert isinstance(annotations, SlideAnnotations)
    found["mask"] = mask


class _Blank:
    """The slide of an annotation: only its sizes are asked for."""

    def __init__(self) -> None:
        from benchmarks.fuzz.seeds import HEIGHT, WIDTH
        from pipelines.slides.geometry import Bounds, levels_from_sizes

        self.levels = levels_from_sizes([(WIDTH, HEIGHT)], MPP)
        self.bounds = Bounds(0, 0, WIDTH, HEIGHT)
        self.mpp = MPP
        self.path = Path("m.svs")
