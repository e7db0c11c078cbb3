"""Checks of slides and backends for faults, in processes that may die.

Takes slides, or the name of a backend; returns what they are and their faults as plain values. A slide library that
aborts on a damaged file takes its process along, and the slide is reported with the signal that ended it.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from app.settings.cli import Finding
from pipelines.backends.registry import BACKENDS, open_slide, other_images
from pipelines.backends.tiff_tags import check_tiff
from pipelines.backends.tiff_writer import JPEG, TILE, PyramidWriter
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.processes import WorkerCrashed, map_isolated
from pipelines.slides.geometry import Region, Size
from pipelines.slides.slide import Pixels, Slide, SlideError
from pipelines.tiles.slide_index import slide_limits

SIDE = 2 * TILE
MPP = 0.5
PROBE_PX = 512
"""Side of a region that is read for a look."""
GRID = 8
"""At most ``GRID`` x ``GRID`` regions of level 0 are read, evenly spread: all of a slide up to 4096 px a side."""
ANY_MPP = 1.0
"""um/px with which a slide without any is opened for a look at the rest of it."""
SAMPLE_TOLERANCE = 4.0
"""Mean difference in grey levels that JPEG may make to the sample picture."""


def sample_picture() -> Pixels:
    """Return soft colours, uint8 (``SIDE``, ``SIDE``, 3): JPEG keeps them to within a few grey levels."""
    x, y = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    return np.stack([x * 255 // SIDE, y * 255 // SIDE, 128 + 0 * x], axis=-1).astype(np.uint8)


def write_samples(folder: Path) -> dict[str, Path]:
    """Write the slides into ``folder``; return backend -> the slide it is to read."""
    picture = sample_picture()
    tiff, ndpi, zarr, png = (folder / name for name in ("sample.tif", "sample.ndpi", "sample.ome.zarr", "sample.png"))
    with PyramidWriter(tiff, Size(SIDE, SIDE), MPP, "MegaTile sample", JPEG, quality=95) as writer:
        writer.add(picture)
    ndpi.write_bytes(_ndpi(picture))
    _write_zarr(zarr, picture)
    png.write_bytes(_encoded(".png", picture, []))
    return {"tiled": tiff, "ndpi": ndpi, "zarr": zarr, "openslide": tiff, "image": png}


def _encoded(kind: str, picture: Pixels, options: list[int]) -> bytes:
    encoded: NDArray[np.uint8] = cv2.imencode(kind, picture[..., ::-1], options)[1]
    return encoded.tobytes()


def _write_zarr(path: Path, picture: Pixels) -> None:
    """Write one uncompressed array (c, y, x) in chunks of ``TILE`` px, Zarr version 2."""
    array = path / "0"
    array.mkdir(parents=True)
    axes = [{"name": "c", "type": "channel"}] + [{"name": n, "type": "space", "unit": "micrometer"} for n in "yx"]
    scale = [{"type": "scale", "scale": [1.0, MPP, MPP]}]
    image = {"version": "0.4", "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": scale}]}
    shape = {"shape": [3, SIDE, SIDE], "chunks": [3, TILE, TILE], "dtype": "|u1", "order": "C"}
    rest = {"zarr_format": 2, "compressor": None, "filters": None, "fill_value": 0}
    (path / ".zgroup").write_text(json.dumps({"zarr_format": 2}))
    (path / ".zattrs").write_text(json.dumps({"multiscales": [image]}))
    (array / ".zarray").write_text(json.dumps(shape | rest))
    for row, column in np.ndindex(2, 2):
        tile = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
        (array / f"0.{row}.{column}").write_bytes(tile.transpose(2, 0, 1).tobytes())


def _ndpi(picture: Pixels) -> bytes:
    """Return one level as one JPEG stream with a restart marker after each row of MCUs, their starts in tag 65426."""
    across = SIDE // 16  # MCUs of 16 px: chroma is halved in both directions
    stream = _encoded(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 95, cv2.IMWRITE_JPEG_RST_INTERVAL, across])
    scan = stream.index(b"\xff\xda")
    scan += 2 + int.from_bytes(stream[scan + 2 : scan + 4], "big")
    restarts = [at + 2 for at in range(scan, len(stream) - 1) if stream[at] == 0xFF and 0xD0 <= stream[at + 1] <= 0xD7]
    starts = struct.pack(f"<{1 + len(restarts)}I", scan, *restarts)
    at_stream, at_resolution = 16, 16 + len(stream)
    at_starts = at_resolution + 8
    at_page = at_starts + len(starts)
    short, long, rational, signed, floating = 3, 4, 5, 9, 11
    lens = int.from_bytes(struct.pack("<f", 20.0), "little")
    entries = [
        (256, long, 1, SIDE), (257, long, 1, SIDE), (258, short, 1, 8), (259, short, 1, 7), (262, short, 1, 6),
        (273, long, 1, at_stream), (277, short, 1, 3), (278, long, 1, SIDE), (279, long, 1, len(stream)),
        (282, rational, 1, at_resolution), (283, rational, 1, at_resolution), (296, short, 1, 3),
        (65420, short, 1, 1), (65421, floating, 1, lens), (65424, signed, 1, 0),
        (65426, long, 1 + len(restarts), at_starts),
    ]  # fmt: skip
    page = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    resolution = struct.pack("<II", round(1e4 / MPP), 1)
    # After a page stand 8 bytes for the next one, then the upper halves of all its values.
    head = b"II*\0" + struct.pack("<Q", at_page) + bytes(4)
    return head + stream + resolution + starts + page + bytes(8 + 4 * len(entries))


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


def check_backends() -> list[Finding]:
    """Let every backend read a tiny slide made for it; return a finding for each."""
    with tempfile.TemporaryDirectory(prefix="megatile-doctor-") as folder:
        slides = write_samples(Path(folder))
        samples = [(name, slides[name]) for name in BACKENDS]
        faults = {name: fault for (name, _), fault in map_isolated(_sample_fault, samples, 1)}
    return [
        Finding("FAULT", name, str(faults[name])) if faults[name] else Finding("ok", name, f"reads {path.name}")
        for name, path in samples
    ]


def _sample_fault(sample: tuple[str, Path]) -> str:
    """Return why the backend of ``sample`` does not give the picture back from its slide; empty when it does."""
    backend, path = sample
    try:
        # A PNG records no resolution.
        with open_slide(path, mpp=MPP if backend == "image" else None, backend=backend) as slide:
            read = slide.read(Region(0, 0, SIDE, SIDE, MPP))
    except Exception as fault:
        return f"{type(fault).__name__}: {_one_line(fault, path)}"
    difference = float(np.abs(read.astype(int) - sample_picture()).mean())
    if difference > SAMPLE_TOLERANCE:
        return f"pixels differ from the sample by {difference:.1f} grey levels on average"
    return ""


def _one_line(fault: Exception, path: Path) -> str:
    text = "; ".join(line.strip() for line in str(fault).splitlines() if line.strip())
    return text.removeprefix(f"{path}: ") or type(fault).__name__
