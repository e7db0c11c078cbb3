"""TIFF structure: faults in words that name the tile, and no file that crashes the reader."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.backends.registry import open_slide
from pipelines.backends.tiff_page import Tag
from pipelines.backends.tiff_tags import check_tiff, read_tiff
from pipelines.slides.slide import NotThisFormat, SlideError
from tests.helpers.real import NDPI, OME_TIFF, PYRAMID_TIFF, SVS
from tests.helpers.tiff_damage import with_tile_entry


@pytest.mark.parametrize("path", [SVS, PYRAMID_TIFF, OME_TIFF, NDPI], ids=lambda path: path.name)
def test_whole_slides_have_no_faults(path: Path) -> None:
    assert check_tiff(path) == []


@pytest.mark.parametrize("path", [SVS, PYRAMID_TIFF, OME_TIFF], ids=lambda path: path.name)
def test_tags_are_those_that_tifffile_reads(path: Path) -> None:
    tiff = read_tiff(path)
    with tifffile.TiffFile(path) as reference:
        assert len(tiff.pages) == len(reference.pages)
        for page, expected in zip(tiff.pages, reference.pages, strict=True):
            assert isinstance(expected, tifffile.TiffPage)
            assert (page.width, page.height) == (expected.imagewidth, expected.imagelength)
            offsets = page.array(Tag.TILE_OFFSETS if page.is_tiled else Tag.STRIP_OFFSETS)
            np.testing.assert_array_equal(offsets, expected.dataoffsets)
            assert page.blob(Tag.JPEG_TABLES) == expected.jpegtables
            assert page.text(Tag.DESCRIPTION) == expected.description
            assert len(page.sub_pages) == len(expected.subifds or ())


@pytest.mark.parametrize("byteorder", ["<", ">"])
@pytest.mark.parametrize("bigtiff", [False, True])
def test_byte_orders_and_bigtiff(tmp_path: Path, byteorder: str, bigtiff: bool) -> None:
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
    ("tag", "value", "fault"),
    [
        (Tag.TILE_BYTES, 0, r"tile without data: tile 65 \(column 5, row 6: .* 0 bytes\)"),
        (Tag.TILE_BYTES, 0xFFFFFFF0, r"tile longer than the rest of the file .*: tile 65 \(column 5, row 6"),
        (Tag.TILE_OFFSETS, 0xFFFFFFF0, r"1 of 130 tiles begin past the end .*: cut short"),
    ],
)
def test_a_bad_tile_entry_is_named(tmp_path: Path, tag: Tag, value: int, fault: str) -> None:
    faults = check_tiff(with_tile_entry(SVS, tmp_path / "slide.svs", 65, tag=tag, value=value))
    assert len(faults) == 1
    with pytest.raises(AssertionError, match=fault):
        raise AssertionError(faults[0])


def directory(*entries: tuple[int, int, int, int], following: int = 0) -> bytes:
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return struct.pack("<H", len(entries)) + packed + struct.pack("<I", following)


SIZE_ENTRIES = ((256, 4, 1, 64), (257, 4, 1, 64))


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (struct.pack("<I", 8) + directory(*SIZE_ENTRIES, following=8), "circle"),
        (struct.pack("<I", 8) + struct.pack("<H", 60_000), "60000 entries do not fit"),
        (struct.pack("<I", 0), "no image"),
        (struct.pack("<I", 8) + directory((256, 4, 1, 0), (257, 4, 1, 64)), "0 x 64 px"),
        (struct.pack("<I", 8) + directory(*SIZE_ENTRIES, (322, 4, 1, 0), (323, 4, 1, 64)), "tile size 0 x 64"),
        (struct.pack("<I", 8) + directory(*SIZE_ENTRIES, (322, 4, 1, 8), (323, 4, 1, 8)), "64 tiles, but 0 offsets"),
        (struct.pack("<I", 8) + directory(*SIZE_ENTRIES, (324, 4, 1 << 31, 8)), "tag 324 .* lies past the end"),
        (struct.pack("<I", 8) + directory(*SIZE_ENTRIES, (324, 99, 1, 8)), "unknown type 99"),
    ],
)
def test_impossible_structure_is_said(tmp_path: Path, body: bytes, fault: str) -> None:
    path = tmp_path / "slide.tif"
    path.write_bytes(b"II*\0" + body)
    with pytest.raises(AssertionError, match=fault):
        raise AssertionError(check_tiff(path))


def test_a_file_damaged_all_over_is_given_up_in_a_short_message(tmp_path: Path) -> None:
    """Garbage taken for directories was read to its end: a message of a megabyte after 20 s."""
    entries = [(int(tag), 99, 1, 0) for tag in Tag] * 20
    body, at = b"", 8
    for _ in range(50):
        page = directory(*entries, following=at + 6 + 12 * len(entries))
        body, at = body + page, at + len(page)
    path = tmp_path / "slide.tif"
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + body)
    faults = check_tiff(path)
    assert len(faults) == 17
    assert faults[-1].endswith("more")
    with pytest.raises(SlideError) as error:
        open_slide(path, mpp=0.5)
    assert len(str(error.value)) < 5_000
    path.write_bytes(b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", 5_000) + bytes(100_000))
    assert check_tiff(path) == ["directory 0 at offset 8: 5000 entries are more than a slide has"]


def test_other_files_have_no_tiff_faults_and_are_no_tiff(tmp_path: Path) -> None:
    for content in (b"", b"II", b"<!DOCTYPE html>", b"II\x2c\0" + bytes(100)):
        path = tmp_path / "file"
        path.write_bytes(content)
        assert check_tiff(path) == []
        with pytest.raises(NotThisFormat, match="not a TIFF file"):
            read_tiff(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_damage_to_the_directories_crashes(tmp_path: Path, data: st.DataObject) -> None:
    """Bytes of the head and of the directories are replaced at will, and the file is cut anywhere."""
    whole = bytearray(OME_TIFF.read_bytes()[:400_000])
    end = 4_000
    for at in data.draw(st.lists(st.integers(0, end), min_size=1, max_size=8)):
        whole[at] = data.draw(st.sampled_from([0, 1, 2, 0x7F, 0x80, 0xFE, 0xFF]))
    path = tmp_path / "slide.tif"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))])
    try:
        tiff = read_tiff(path)
    except SlideError:
        return
    assert all(isinstance(fault, str) for fault in check_tiff(path))
    assert len(tiff.pages) >= 1
