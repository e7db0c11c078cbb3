"""Every entry of a TIFF's directories changed in type, count and value: only our errors, and no px is wrong."""

from __future__ import annotations

import functools
import itertools
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tifffile

from pipelines.backends import openslide as openslide_backend
from pipelines.backends.registry import open_slide
from pipelines.backends.tiff_page import Tag
from pipelines.slides.geometry import Region
from pipelines.slides.slide import UNEXPECTED, SlideError, TileReadError
from tests.helpers.real import OME_TIFF, PYRAMID_TIFF, SVS
from tests.helpers.tiff_damage import with_bytes

MPP = 0.5
KINDS = {"deflate": {"photometric": "rgb"}, "jpeg": {"photometric": "ycbcr"}}
VALUES = [0, 1, 3, 7, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
COUNTS = [0, 2, 3, 100, 1 << 20, (1 << 32) - 1]
FLOATS = [struct.unpack("<I", struct.pack("<f", x))[0] for x in (float("inf"), float("nan"), 1e30, -1.0)]


@dataclass(frozen=True)
class Entry:
    offset: int
    tag: int
    kind: int
    count: int
    value: int

    def packed(self) -> bytes:
        return struct.pack("<HHII", self.tag, self.kind, self.count, self.value)


def entries(path: Path) -> list[Entry]:
    """Of the directories of a little-endian classic TIFF."""
    data, found = path.read_bytes(), []
    at = struct.unpack_from("<I", data, 4)[0]
    while at:
        number = struct.unpack_from("<H", data, at)[0]
        found += [Entry(at + 2 + 12 * i, *struct.unpack_from("<HHII", data, at + 2 + 12 * i)) for i in range(number)]
        at = struct.unpack_from("<I", data, at + 2 + 12 * number)[0]
    return found


@functools.cache
def whole(path: Path) -> np.ndarray:
    with open_slide(path) as slide:
        return slide.read(Region(0, 0, slide.levels[0].width, slide.levels[0].height, slide.mpp))


def pyramid(path: Path, compression: str) -> Path:
    y, x = np.mgrid[:96, :128]
    pixels = np.stack([x * 2, y * 2, (x + y) % 256], axis=-1).astype(np.uint8)
    resolution = {"resolution": (10_000 / MPP,) * 2, "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path) as file:
        for step in (1, 2):
            reduced = {"subfiletype": 1} if step > 1 else {}
            file.write(
                pixels[::step, ::step],
                tile=(32, 32),
                compression=compression,
                **KINDS[compression],
                **resolution,
                **reduced,
            )
    return path


def changes(entry: Entry) -> Iterator[tuple[str, Entry]]:
    place = (entry.offset, entry.tag)
    yield from (("type", Entry(*place, kind, entry.count, entry.value)) for kind in range(20) if kind != entry.kind)
    yield from (("type", Entry(*place, 11, entry.count, value)) for value in FLOATS)
    yield from (("count", Entry(*place, entry.kind, n, entry.value)) for n in COUNTS if n != entry.count)
    yield from (("value", Entry(*place, entry.kind, entry.count, value)) for value in VALUES if value != entry.value)
    yield "tag", Entry(entry.offset, 60_000, entry.kind, entry.count, entry.value)


def outcome(path: Path, right: np.ndarray) -> str:
    """``same``, ``other`` pixels or um/px, ``refused``, or ``unforeseen``: refused by no rule of ours."""
    try:
        with open_slide(path) as slide:
            if slide.mpp != pytest.approx(MPP) or right.shape[:2] != (slide.levels[0].height, slide.levels[0].width):
                return "other"
            pixels = slide.read(Region(0, 0, right.shape[1], right.shape[0], slide.mpp))
    except SlideError as error:
        return "unforeseen" if f" {UNEXPECTED} " in str(error) else "refused"
    return "same" if np.array_equal(pixels, right) else "other"


@pytest.mark.parametrize("compression", list(KINDS))
def test_no_change_of_an_entry_is_another_error_or_another_picture(tmp_path: Path, compression: str) -> None:
    path = pyramid(tmp_path / "whole.tif", compression)
    right, found = whole(path), entries(path)
    finest = len(found) // 2
    assert finest > 12
    wrong = []
    for i, entry in enumerate(found):
        for what, changed in itertools.islice(changes(entry), None, None, 1 if i < finest else 5):
            damaged = with_bytes(path, tmp_path / "slide.tif", entry.offset, changed.packed())
            if (became := outcome(damaged, right)) in ("other", "unforeseen"):
                wrong.append((became, what, changed))
    # A value in range is as good as another: the place of a table or of a resolution, a smaller image of as many tiles.
    values_in_range = {Tag.X_RESOLUTION, Tag.Y_RESOLUTION, Tag.TILE_OFFSETS, Tag.TILE_BYTES, Tag.WIDTH, Tag.HEIGHT}
    assert [w for w in wrong if w[:2] != ("other", "value") or w[2].tag not in values_in_range] == []


@pytest.mark.parametrize(("path", "old", "new"), [(SVS, 2, 6), (PYRAMID_TIFF, 6, 2), (OME_TIFF, 6, 2)], ids=str)
def test_another_photometric_tag_is_refused(tmp_path: Path, path: Path, old: int, new: int) -> None:
    needle = struct.pack("<HHI", Tag.PHOTOMETRIC, 3, 1)
    data = path.read_bytes()
    if needle + struct.pack("<I", old) not in data:
        needle = struct.pack("<HHQ", Tag.PHOTOMETRIC, 3, 1)  # BigTIFF
    at = data.index(needle + struct.pack("<I", old)) + len(needle)
    damaged = with_bytes(path, tmp_path / path.name, at, struct.pack("<H", new))
    with pytest.raises(SlideError, match=r"its JPEG data are (RGB|YCbCr), its tags say"):
        open_slide(damaged)


def test_openslide_is_handed_no_tile_of_gigabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openslide_backend, "OpenSlide", lambda path: pytest.fail(f"OpenSlide was given {path}"))
    path = tmp_path / "slide.tif"
    side = 46_340
    sides = [(256, 4, 1, side), (257, 4, 1, side), (322, 4, 1, side), (323, 4, 1, side)]
    table = [(324, 4, 1, 8), (325, 4, 1, 100)]
    colours = [(258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    packed = b"".join(struct.pack("<HHII", *entry) for entry in sorted(sides + table + colours))
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 9) + packed + bytes(220))
    for backend in ("auto", "tiled", "openslide", "image"):
        with pytest.raises(SlideError, match="tile size 46340 x 46340 px"):
            open_slide(path, mpp=MPP, backend=backend)


def test_an_image_that_does_not_fit_into_its_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slide.tif"
    sides = [(256, 4, 1, 1_000_000), (257, 4, 1, 1_000_000), (322, 4, 1, 512), (323, 4, 1, 512)]
    colours = [(258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1)]
    packed = b"".join(struct.pack("<HHII", *entry) for entry in sorted(sides + colours))
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 7) + packed + bytes(1000))
    with pytest.raises(SlideError, match=r"so many px do not fit into a file of \d+ bytes"):
        open_slide(path, mpp=MPP)


def test_a_long_description_is_searched_once(tmp_path: Path) -> None:
    """Each `<Pixels` looked for its end up to the end of the text: a megabyte took minutes."""
    path = tmp_path / "slide.tif"
    description = "<OME>" + "<Pixels " * 200_000
    tifffile.imwrite(
        path, np.zeros((64, 64, 3), np.uint8), tile=(32, 32), photometric="rgb", description=description, metadata=None
    )
    with pytest.raises(SlideError, match="does not record its um/px"):
        open_slide(path)


def test_a_tile_longer_than_its_pixels_is_damaged(tmp_path: Path) -> None:
    """LZW and plain tiles were cut to size, so that three samples read as one made a picture."""
    path = tmp_path / "slide.tif"
    tifffile.imwrite(path, np.zeros((32, 32, 3), np.uint8), tile=(32, 32), photometric="rgb")
    with open_slide(path, mpp=MPP) as slide:
        slide.read(Region(0, 0, 32, 32, MPP))
    width = next(entry for entry in entries(path) if entry.tag == Tag.TILE_WIDTH)
    height = next(entry for entry in entries(path) if entry.tag == Tag.HEIGHT)
    data = bytearray(path.read_bytes())
    data[width.offset : width.offset + 12] = struct.pack("<HHII", Tag.TILE_WIDTH, 4, 1, 16)
    data[height.offset : height.offset + 12] = struct.pack("<HHII", Tag.HEIGHT, 4, 1, 32)
    size = next(entry for entry in entries(path) if entry.tag == Tag.WIDTH)
    data[size.offset : size.offset + 12] = struct.pack("<HHII", Tag.WIDTH, 4, 1, 16)
    path.write_bytes(data)
    with open_slide(path, mpp=MPP) as slide, pytest.raises(TileReadError, match="3072 bytes of pixels instead of 1536"):
        slide.read(Region(0, 0, 16, 16, MPP))


@pytest.mark.parametrize("backend", ["tiled", "openslide"])
@pytest.mark.parametrize("changed", [(296, 99, 1, 3), (296, 3, 0, 3), (296, 3, 1, 77), (295, 3, 1, 3)])
def test_a_resolution_without_a_readable_unit_is_no_mpp(
    tmp_path: Path, backend: str, changed: tuple[int, int, int, int]
) -> None:
    """The inch that stands in for it made 0.5 um/px to 1.27."""
    path = pyramid(tmp_path / "whole.tif", "jpeg")
    unit = next(entry for entry in entries(path) if entry.tag == Tag.RESOLUTION_UNIT)
    damaged = with_bytes(path, tmp_path / "slide.tif", unit.offset, struct.pack("<HHII", *changed))
    with pytest.raises(
        SlideError, match=r"unit that is not read|not record its um/px|tag 296 (\(RESOLUTION_UNIT\)|has)"
    ):
        open_slide(damaged, backend=backend)


def test_a_pipe_is_no_slide(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "slide.svs")
    with pytest.raises(SlideError, match="neither a file nor a folder"):
        open_slide(tmp_path / "slide.svs")
