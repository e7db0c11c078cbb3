"""JPEG streams as slides hold them: colours as the caller says, damage heard, headers resized."""

import numpy as np
import pytest
import simplejpeg

from pipelines.backends.codecs import JpegTiles, StreamHeader, decode, segments
from pipelines.backends.tiff_page import Tag
from pipelines.backends.tiff_tags import read_tiff
from tests.helpers.openslide_pixels import openslide_pixels
from tests.helpers.real import NDPI, SVS
from tests.helpers.tiff_damage import tile_extent

JFIF = bytes.fromhex("ffe000104a46494600010100000100010000")
ADOBE_YCBCR = bytes.fromhex("ffee000e41646f62650064000000000001")[:15] + b"\x01"


@pytest.fixture(scope="module")
def aperio():
    """Tables and one tile of the JPEG/RGB slide, and its pixels."""
    offset, count = tile_extent(SVS, 44)
    tables = read_tiff(SVS).pages[0].blob(Tag.JPEG_TABLES)
    return tables, SVS.read_bytes()[offset : offset + count], openslide_pixels(SVS, 960, 960, 240, 240)


def decoded(decoder, data, side=240):
    out = np.empty((side, side, 3), np.uint8)
    decoder(data, out)
    return out


@pytest.mark.parametrize("marker", [b"", JFIF, ADOBE_YCBCR, JFIF + ADOBE_YCBCR], ids=["none", "JFIF", "Adobe", "both"])
def test_the_argument_rules_over_colour_markers(aperio, marker):
    tables, tile, pixels = aperio
    for tables_marker, tile_marker in ((b"", marker), (marker, b"")):
        decoder = JpegTiles(tables[:2] + tables_marker + tables[2:], ycbcr=False)
        np.testing.assert_array_equal(decoded(decoder, tile[:2] + tile_marker + tile[2:]), pixels)


def test_a_tile_with_its_own_tables():
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    stream = simplejpeg.encode_jpeg(noise, 80, colorsubsampling="420")
    ours = decoded(JpegTiles(None, ycbcr=True), stream, side=64)
    np.testing.assert_array_equal(ours, simplejpeg.decode_jpeg(stream, "RGB"))


@pytest.mark.parametrize(
    ("change", "side", "words"),
    [
        (lambda tile: b"", 240, "begins with nothing"),
        (lambda tile: bytes(100), 240, "begins with 00 00 00 00"),
        (lambda tile: tile[: len(tile) // 2], 240, "[Pp]remature end"),
        (lambda tile: tile[:2000] + bytes(500) + tile[2500:], 240, "Corrupt JPEG data"),
        (lambda tile: tile[:30], 240, "JPEG"),
        (lambda tile: tile, 232, "240"),
        (lambda tile: tile, 248, "240"),
    ],
)
def test_damage_and_another_size_are_errors(aperio, change, side, words):
    tables, tile, _ = aperio
    with pytest.raises(ValueError, match=words):
        decoded(JpegTiles(tables, ycbcr=False), change(tile), side)


def test_segments_stop_at_the_scan_and_refuse_what_does_not_fit():
    stream = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    found = segments(stream)
    assert found[-1][0] == 0xDA
    assert stream.startswith(stream[:2] + b"".join(part for _, part in found))
    with pytest.raises(ValueError, match="does not fit"):
        segments(stream[:30])


def test_a_header_resized_to_a_restart_segment():
    page, data = read_tiff(NDPI).pages[0], NDPI.read_bytes()
    start = page.number(Tag.STRIP_OFFSETS, 0)
    header = StreamHeader.parse(data[start : start + 4000])
    assert (header.mcu_width, header.mcu_height, header.interval) == (8, 8, 496)
    starts = page.array(Tag.NDPI_STARTS_LOW)
    assert len(header.stream) == starts[0]
    out = np.empty((8, 3968, 3), np.uint8)
    decode(header.resized(3968, 8) + data[start + starts[200] : start + starts[201] - 2] + b"\xff\xd9", out)
    np.testing.assert_array_equal(out, openslide_pixels(NDPI, 0, 1600, 3968, 8))
    with pytest.raises(ValueError, match="65535"):
        header.resized(70_000, 8)


def test_streams_that_are_not_baseline_colour_are_refused():
    colour = simplejpeg.encode_jpeg(np.zeros((16, 16, 3), np.uint8))
    grey = simplejpeg.encode_jpeg(np.zeros((16, 16, 1), np.uint8), colorspace="GRAY", colorsubsampling="Gray")
    progressive = colour.replace(b"\xff\xc0", b"\xff\xc2", 1)
    for stream, words in ((progressive, "not baseline"), (grey, "3 components"), (b"II*\0", "begins with 49 49")):
        with pytest.raises(ValueError, match=words):
            StreamHeader.parse(stream)
