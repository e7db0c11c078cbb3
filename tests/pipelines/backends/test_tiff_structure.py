"""TIFF directories: tags as tifffile reads them, faults in words that name the place; no change of an entry crashes
the reader or makes another picture."""

import functools
import itertools
import struct
from dataclasses import dataclass

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.backends import openslide as openslide_backend
from pipelines.backends.registry import open_slide
from pipelines.backends.tiff_page import Tag
from pipelines.backends.tiff_tags import check_tiff, read_tiff
from pipelines.slides.geometry import Region
from pipelines.slides.slide import UNEXPECTED, NotThisFormat, SlideError, TileReadError
from tests.helpers.real import NDPI, OME_TIFF, PYRAMID_TIFF, SVS
from tests.helpers.tiff_damage import with_bytes, with_tile_entry

MPP = 0.5
HEAD = b"II*\0" + struct.pack("<I", 8)


@pytest.mark.parametrize("path", [SVS, PYRAMID_TIFF, OME_TIFF, NDPI], ids=lambda path: path.name)
def test_tags_of_whole_slides_are_those_that_tifffile_reads(path):
    assert check_tiff(path) == []
    if path is NDPI:
        return
    tiff = read_tiff(path)
    with tifffile.TiffFile(path) as reference:
        assert len(tiff.pages) == len(reference.pages)
        for page, expected in zip(tiff.pages, reference.pages, strict=True):
            assert (page.width, page.height) == (expected.imagewidth, expected.imagelength)
            offsets = page.array(Tag.TILE_OFFSETS if page.is_tiled else Tag.STRIP_OFFSETS)
            np.testing.assert_array_equal(offsets, expected.dataoffsets)
            assert page.blob(Tag.JPEG_TABLES) == expected.jpegtables
            assert page.text(Tag.DESCRIPTION) == expected.description
            assert len(page.sub_pages) == len(expected.subifds or ())


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("bigtiff", [False, True])
def test_byte_orders_and_bigtiff(tmp_path, byteorder, bigtiff):
    path = tmp_path / "slide.tif"
    pixels = np.zeros((100, 150, 3), np.uint8)
    with tifffile.TiffWriter(path, byteorder=byteorder, bigtiff=bigtiff) as writer:
        writer.write(pixels, tile=(64, 64), subifds=1, photometric="rgb", resolution=(4, 5), resolutionunit=3)
        writer.write(pixels[::2, ::2], tile=(64, 64), subfiletype=1, photometric="rgb")
    page = read_tiff(path).pages[0]
    assert (page.width, page.height, page.grid) == (150, 100, (3, 2))
    assert page.array(Tag.BITS).tolist() == [8, 8, 8]
    assert page.array(Tag.Y_RESOLUTION).tolist() == [5, 1]
    assert [(sub.width, sub.height) for sub in page.sub_pages] == [(75, 50)]
    assert check_tiff(path) == []


@pytest.mark.parametrize(
    ("tag", "value", "words"),
    [
        (Tag.TILE_BYTES, 0, ("without data: tile 65 (column 5, row 6", " 0 bytes")),
        (Tag.TILE_BYTES, 0xFFFFFFF0, ("longer than the rest of the file", "tile 65 (column 5, row 6")),
        (Tag.TILE_OFFSETS, 0xFFFFFFF0, ("1 of 130 tiles begin past the end", "cut short")),
    ],
)
def test_a_bad_tile_entry_is_named(tmp_path, tag, value, words):
    (fault,) = check_tiff(with_tile_entry(SVS, tmp_path / "slide.svs", 65, tag=tag, value=value))
    assert all(word in fault for word in words)


def directory(*entries, following=0):
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + packed + struct.pack("<I", following)


SIZES = ((256, 4, 1, 64), (257, 4, 1, 64))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (HEAD + directory(*SIZES, following=8), "circle"),
        (HEAD + struct.pack("<H", 60_000), "60000 entries do not fit"),
        (HEAD + struct.pack("<H", 5_000) + bytes(100_000), "5000 entries are more than a slide has"),
        (b"II*\0" + bytes(4), "no image"),
        (HEAD + directory((256, 4, 1, 0), (257, 4, 1, 64)), "0 x 64 px"),
        (HEAD + directory(*SIZES, (322, 4, 1, 0), (323, 4, 1, 64)), "tile size 0 x 64"),
        (HEAD + directory(*SIZES, (322, 4, 1, 8), (323, 4, 1, 8)), "64 tiles, but 0 offsets"),
        (HEAD + directory(*SIZES, (324, 4, 1 << 31, 8)), "tag 324"),
        (HEAD + directory(*SIZES, (324, 99, 1, 8)), "unknown type 99"),
    ],
)
def test_impossible_structure_is_said(tmp_path, data, words):
    (tmp_path / "slide.tif").write_bytes(data)
    assert words in " ".join(check_tiff(tmp_path / "slide.tif"))


def test_a_file_damaged_all_over_is_given_up_in_a_short_message(tmp_path):
    """Garbage taken for directories was read to its end: a message of a megabyte after 20 s."""
    entries = [(int(tag), 99, 1, 0) for tag in Tag] * 20
    body, at = b"", 8
    for _ in range(50):
        page = directory(*entries, following=at + 6 + 12 * len(entries))
        body, at = body + page, at + len(page)
    path = tmp_path / "slide.tif"
    path.write_bytes(HEAD + body)
    assert len(check_tiff(path)) == 17
    assert check_tiff(path)[-1].endswith("more")
    with pytest.raises(SlideError) as error:
        open_slide(path, mpp=MPP)
    assert len(str(error.value)) < 5_000


@pytest.mark.parametrize("content", [b"", b"II", b"<!DOCTYPE html>", b"II\x2c\0" + bytes(100)])
def test_other_files_have_no_tiff_faults_and_are_no_tiff(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    assert check_tiff(tmp_path / "file") == []
    with pytest.raises(NotThisFormat, match="not a TIFF file"):
        read_tiff(tmp_path / "file")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_the_directories_crashes(tmp_path, data):
    """Bytes of the head and of the directories are replaced at will, and the file is cut anywhere."""
    whole = bytearray(OME_TIFF.read_bytes()[:400_000])
    for at in data.draw(st.lists(st.integers(0, 4_000), min_size=1, max_size=8)):
        whole[at] = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF]))
    path = tmp_path / "slide.tif"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        tiff = read_tiff(path)
    except SlideError:
        return
    assert all(isinstance(fault, str) for fault in check_tiff(path))
    assert len(tiff.pages) >= 1


KINDS = {"deflate": "rgb", "jpeg": "ycbcr"}
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

    def packed(self):
        return struct.pack("<HHII", self.tag, self.kind, self.count, self.value)


def entries_of(path):
    """Of the directories of a little-endian classic TIFF."""
    data, found = path.read_bytes(), []
    at = struct.unpack_from("<I", data, 4)[0]
    while at:
        number = struct.unpack_from("<H", data, at)[0]
        found += [Entry(at + 2 + 12 * i, *struct.unpack_from("<HHII", data, at + 2 + 12 * i)) for i in range(number)]
        at = struct.unpack_from("<I", data, at + 2 + 12 * number)[0]
    return found


def write_pyramid(path, compression):
    y, x = np.mgrid[:96, :128]
    pixels = np.stack([x * 2, y * 2, (x + y) % 256], axis=-1).astype(np.uint8)
    options = {"compression": compression, "photometric": KINDS[compression], "tile": (32, 32)}
    options |= {"resolution": (10_000 / MPP,) * 2, "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(path) as file:
        for step in (1, 2):
            file.write(pixels[::step, ::step], subfiletype=step - 1, **options)
    return path


def changes(entry):
    place = (entry.offset, entry.tag)
    yield from (("type", Entry(*place, kind, entry.count, entry.value)) for kind in range(20) if kind != entry.kind)
    yield from (("type", Entry(*place, 11, entry.count, value)) for value in FLOATS)
    yield from (("count", Entry(*place, entry.kind, n, entry.value)) for n in COUNTS if n != entry.count)
    yield from (("value", Entry(*place, entry.kind, entry.count, value)) for value in VALUES if value != entry.value)
    yield "tag", Entry(entry.offset, 60_000, entry.kind, entry.count, entry.value)


@functools.cache
def whole(path):
    with open_slide(path) as slide:
        return slide.read(Region(0, 0, slide.levels[0].width, slide.levels[0].height, slide.mpp))


def outcome(path, right):
    """``same``, ``other`` pixels or um/px, ``refused``, or ``unforeseen``: refused by no rule of ours."""
    try:
        with open_slide(path) as slide:
            if slide.mpp != pytest.approx(MPP) or right.shape[:2] != (slide.levels[0].height, slide.levels[0].width):
                return "other"
            pixels = slide.read(Region(0, 0, right.shape[1], right.shape[0], slide.mpp))
    except SlideError as error:
        return "unforeseen" if f" {UNEXPECTED} " in str(error) else "refused"
    return "same" if np.array_equal(pixels, right) else "other"


@pytest.mark.parametrize("compression", KINDS)
def test_no_change_of_an_entry_is_another_error_or_another_picture(tmp_path, compression):
    path = write_pyramid(tmp_path / "whole.tif", compression)
    right, found = whole(path), entries_of(path)
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
def test_ycbcr_under_an_rgb_tag_is_read_and_rgb_under_a_ycbcr_tag_is_refused(tmp_path, path, old, new):
    data = path.read_bytes()
    heads = [struct.pack(count, Tag.PHOTOMETRIC, 3, 1) for count in ("<HHI", "<HHQ")]  # classic and BigTIFF
    head = next(head for head in heads if head + struct.pack("<I", old) in data)
    at = data.index(head + struct.pack("<I", old)) + len(head)
    damaged = with_bytes(path, tmp_path / path.name, at, struct.pack("<H", new))
    if new == 6:
        with pytest.raises(SlideError, match="its JPEG data are RGB, its tags say YCbCr"):
            open_slide(damaged)
        return
    with open_slide(path) as right, open_slide(damaged) as slide:
        for level in right.levels:
            region = Region(0, 0, level.width, level.height, level.mpp)
            np.testing.assert_array_equal(slide.read(region), right.read(region))


def test_images_and_tiles_that_cannot_be_are_refused_before_openslide_sees_them(tmp_path, monkeypatch):
    monkeypatch.setattr(openslide_backend, "OpenSlide", lambda path: pytest.fail(f"OpenSlide was given {path}"))
    path = tmp_path / "slide.tif"
    sides = [(tag, 4, 1, 46_340) for tag in (256, 257, 322, 323)]
    grey = [(258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    path.write_bytes(HEAD + directory(*sorted([*sides, *grey, (324, 4, 1, 8), (325, 4, 1, 100)])) + bytes(220))
    for backend in ("auto", "tiled", "openslide", "image"):
        with pytest.raises(SlideError, match="tile size 46340 x 46340 px"):
            open_slide(path, mpp=MPP, backend=backend)
    sides = [(256, 4, 1, 1_000_000), (257, 4, 1, 1_000_000), (322, 4, 1, 512), (323, 4, 1, 512)]
    path.write_bytes(HEAD + directory(*sorted([*sides, (258, 3, 1, 8), (259, 3, 1, 8), (262, 3, 1, 1)])) + bytes(1000))
    with pytest.raises(SlideError, match=r"so many px do not fit into a file of \d+ bytes"):
        open_slide(path, mpp=MPP)


def test_a_long_description_is_searched_once(tmp_path):
    """Each `<Pixels` looked for its end up to the end of the text: a megabyte took minutes."""
    options = {"tile": (32, 32), "photometric": "rgb", "description": "<OME>" + "<Pixels " * 200_000, "metadata": None}
    tifffile.imwrite(tmp_path / "slide.tif", np.zeros((64, 64, 3), np.uint8), **options)
    with pytest.raises(SlideError, match="does not record its um/px"):
        open_slide(tmp_path / "slide.tif")


def test_a_tile_longer_than_its_pixels_is_damaged(tmp_path):
    """LZW and plain tiles were cut to size, so that three samples read as one made a picture."""
    path = tmp_path / "slide.tif"
    tifffile.imwrite(path, np.zeros((32, 32, 3), np.uint8), tile=(32, 32), photometric="rgb")
    with open_slide(path, mpp=MPP) as slide:
        slide.read(Region(0, 0, 32, 32, MPP))
    for entry in entries_of(path):
        if entry.tag in (Tag.TILE_WIDTH, Tag.WIDTH):
            with_bytes(path, path, entry.offset, struct.pack("<HHII", entry.tag, 4, 1, 16))
    with open_slide(path, mpp=MPP) as slide, pytest.raises(TileReadError, match="3072 bytes of pixels instead of 1536"):
        slide.read(Region(0, 0, 16, 16, MPP))


@pytest.mark.parametrize("backend", ["tiled", "openslide"])
@pytest.mark.parametrize("changed", [(296, 99, 1, 3), (296, 3, 0, 3), (296, 3, 1, 77), (295, 3, 1, 3)])
def test_a_resolution_without_a_readable_unit_is_no_mpp(tmp_path, backend, changed):
    """The inch that stands in for it made 0.5 um/px to 1.27."""
    path = write_pyramid(tmp_path / "whole.tif", "jpeg")
    unit = next(entry for entry in entries_of(path) if entry.tag == Tag.RESOLUTION_UNIT)
    damaged = with_bytes(path, tmp_path / "slide.tif", unit.offset, struct.pack("<HHII", *changed))
    with pytest.raises(SlideError, match=r"unit that is not read|not record its um/px|tag 296"):
        open_slide(damaged, backend=backend)
