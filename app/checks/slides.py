"""Checks of slides and slide libraries for faults, in processes that may die.

Takes slides; returns what they are and their faults as plain values. A slide library that aborts on a damaged file
takes its process along, and the slide is reported with the signal that ended it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from app.settings.cli import Finding
from pipelines.backends.registry import other_images
from pipelines.backends.tiff_tags import check_tiff
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.processes import WorkerCrashed, map_isolated
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Slide, SlideError
from pipelines.tiles.slide_index import slide_limits

LIBRARIES = ("imagecodecs", "simplejpeg", "zarr")
"""Libraries that decode slides; ``describe_environment`` imports OpenSlide."""
PROBE_PX = 512
"""Side of a region that is read for a look."""
GRID = 8
"""At most ``GRID`` x ``GRID`` regions of level 0 are read, evenly spread: all of a slide up to 4096 px a side."""
ANY_MPP = 1.0
"""um/px with which a slide without any is opened for a look at the rest of it."""


@dataclass(frozen=True)
class SlideCheck:
    """The facts of a slide, as far as it opened; ``faults`` is empty for a good one.

    ``other_images`` are those of its file that are not read: labels, macros, thumbnails, scenes, focal planes.
    """

    slide_id: str
    backend: str = "–"
    mpp: float | None = None
    width: int = 0
    height: int = 0
    levels: int = 0
    faults: tuple[str, ...] = ()
    other_images: tuple[str, ...] = ()


def check_slides(specs: Sequence[SlideSpec], workers: int) -> Iterator[SlideCheck]:
    """Yield the check of every slide, at most ``workers`` concurrently; in the order of completion."""
    for spec, check in map_isolated(check_slide, specs, workers, slide_limits(1)):
        if isinstance(check, WorkerCrashed):
            check = SlideCheck(spec.slide_id, faults=(f"{check}; the file is damaged, or memory ran out",))
        yield check


def check_slide(spec: SlideSpec) -> SlideCheck:
    """Open a slide, read regions all over it and return what it is, with its faults instead of raising them."""
    try:
        slide = spec.open()
    except Exception as fault:  # slide libraries raise anything
        return _without_mpp(spec, _one_line(fault, spec.path))
    with slide:
        level = slide.levels[0]
        check = SlideCheck(spec.slide_id, slide.backend, slide.mpp, level.width, level.height, len(slide.levels))
        faults, others = [*_structure_faults(spec.path), *_read_faults(slide)], list[str]()
        try:
            others = other_images(spec.path, spec.scene)
        except (OSError, SlideError) as fault:  # such as a server that no longer answers
            faults.append(_one_line(fault, spec.path))
        return replace(check, faults=tuple(faults), other_images=tuple(others))


def _without_mpp(spec: SlideSpec, fault: str) -> SlideCheck:
    """Return the check of a slide that does not open: with its size if its um/px is all that is missing."""
    check = SlideCheck(spec.slide_id) if spec.mpp is not None else check_slide(replace(spec, mpp=ANY_MPP))
    found = check.faults if check.levels else ()  # damage, beside what is missing
    return replace(check, mpp=None, faults=(fault, *found))


def _structure_faults(path: Path) -> list[str]:
    """Return what the tables of a TIFF file already tell: damage that no region read here may meet."""
    try:
        return check_tiff(path) if path.is_file() else []
    except (OSError, SlideError) as fault:
        return [_one_line(fault, path)]


def _read_faults(slide: Slide) -> tuple[str, ...]:
    regions = list(_regions(slide))
    faults = []
    for region in regions:
        try:
            slide.read(region)
        except Exception as fault:  # a codec raises anything on damaged bytes; the next region may be whole
            faults.append(_one_line(fault, slide.path))
    if len(faults) > 1:
        return (f"{len(faults)} of {len(regions)} regions cannot be read; the first: {faults[0]}",)
    return tuple(faults)


def _regions(slide: Slide) -> Iterator[Region]:
    """Yield regions of level 0 spread over its bounds, and one from the middle of each coarser level."""
    bounds = slide.bounds
    for l0_y in _spread(bounds.l0_y, bounds.height):
        for l0_x in _spread(bounds.l0_x, bounds.width):
            yield Region(l0_x, l0_y, PROBE_PX, PROBE_PX, slide.mpp)
    for level in slide.levels[1:]:
        l0_half = PROBE_PX * level.downsample / 2
        l0_left = round(bounds.l0_x + bounds.width / 2 - l0_half)
        l0_top = round(bounds.l0_y + bounds.height / 2 - l0_half)
        yield Region(l0_left, l0_top, PROBE_PX, PROBE_PX, level.mpp)


def _spread(l0_start: int, length: int) -> list[int]:
    """Return where regions begin along one side: ``GRID`` of them at most, evenly spread where they do not cover it."""
    count = -(-length // PROBE_PX)
    numbers = range(count) if count <= GRID else (round(i * (count - 1) / (GRID - 1)) for i in range(GRID))
    return [l0_start + i * PROBE_PX for i in numbers]


def check_libraries() -> Iterator[Finding]:
    """Import each slide library, which may end its process, and yield a finding for it."""
    for name, fault in map_isolated(_import_fault, LIBRARIES, 1):
        text = f"{fault}; install it again: pip install --force-reinstall {name}" if fault else "imports"
        yield Finding("FAULT" if fault else "ok", name, text)


def _import_fault(library: str) -> str:
    try:
        importlib.import_module(library)
    except Exception as fault:  # a binary that does not fit raises anything
        return f"{type(fault).__name__}: {' '.join(str(fault).split())}"
    return ""


def _one_line(fault: Exception, path: Path) -> str:
    text = "; ".join(line.strip() for line in str(fault).splitlines() if line.strip())
    return text.removeprefix(f"{path}: ") or type(fault).__name__
