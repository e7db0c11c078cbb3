"""Annotations as disks and other programs leave them: a bad one takes its slide out, and nothing else."""

import json
import random
import struct
import time
import zlib
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile

from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from tests.helpers.drawings import annotations_in, area, blank_slide, box, mask_of, write_geojson

MASK = np.kron(np.eye(8, dtype=np.uint8), np.ones((8, 8), np.uint8))


def geojson(coordinates, name="Tumor"):
    feature = {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": coordinates}}
    return json.dumps({**feature, "properties": {"classification": {"name": name}}}).encode()


def png_of(side, data=b""):
    """A PNG that says it has this many pixels of 8 bits on a side."""
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    chunks = b"IHDR" + header, b"IDAT" + zlib.compress(data), b"IEND"
    framed = (struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


def tiff(folder, change):
    path = folder / "mask.tmp.tif"
    tifffile.imwrite(path, MASK, tile=(16, 16), compression="zlib")
    data = bytearray(path.read_bytes())
    path.unlink()
    change(data)
    return bytes(data)


def tag_type(number, kind):
    """The tag ``number`` gets the type ``kind``."""

    def change(data):
        first = struct.unpack_from("<I", data, 4)[0]
        for k in range(struct.unpack_from("<H", data, first)[0]):
            at = first + 2 + 12 * k
            if struct.unpack_from("<H", data, at)[0] == number:
                struct.pack_into("<H", data, at + 2, kind)

    return change


SQUARE = [(1, 1), (5, 1), (5, 5), (1, 5)]
BAD = {
    "huge.geojson": geojson([[(1, 1), (10**400, 1), (5, 5)]]),
    "digits.geojson": b'{"type": "Polygon", "coordinates": [[[1, 1], [' + b"9" * 5000 + b", 1], [5, 5]]]}",
    "far.geojson": geojson([[(1, 1), (1e300, 1), (5, 5)]]),
    "nested.geojson": b"[" * 200_000 + b"]" * 200_000,
    "latin1.geojson": json.dumps(area([SQUARE], "Tümör"), ensure_ascii=False).encode("latin-1"),
    "many.geojson": json.dumps([box(0, 0, 5, 5, f"class {k}") for k in range(300)]).encode(),
    "bomb.png": png_of(60_000, bytes(1000)),
    "wide.png": png_of(2**31 - 1),
    "deep.png": imagecodecs.png_encode(MASK.astype(np.uint16) * 1000),
    "empty.tif": b"",
}
TAGS = [(number, kind) for number in (256, 257, 258, 322, 324, 325) for kind in (2, 11, 12)]


def annotations_of(folder):
    return annotations_in(folder, *(path.stem for path in sorted(folder.iterdir())))


@pytest.mark.parametrize("name", BAD)
def test_a_bad_annotation_takes_its_slide_out(name, tmp_path):
    write_geojson(tmp_path / "good.geojson", box(0, 0, 5, 5, "Tumor"))
    (tmp_path / name).write_bytes(BAD[name])
    begun_s = time.process_time()
    found = annotations_of(tmp_path)
    assert time.process_time() - begun_s < 5
    assert set(found.paths) == {"good"}
    assert found.classes == ("background", "Tumor")
    assert name in found.failed[Path(name).stem]
    assert "\n" not in found.failed[Path(name).stem]


def outcome(folder, name, data):
    """Return what becomes of an annotation next to a good one: good, or bad when it is opened or drawn."""
    (folder / name).write_bytes(data)
    try:
        found = annotations_of(folder)
        if "x" not in found.paths:
            return "refused"
        mask_of(found, "x", blank_slide(64, 64), Region(0, 0, 64, 64, 0.5))
        return "drawn"
    except SlideError:
        return "refused when drawn"
    except ValueError as fault:
        if "mask values are class ids" not in str(fault):
            raise
        return "unnamed"
    finally:
        (folder / name).unlink()


@pytest.mark.parametrize(("number", "kind"), TAGS)
def test_a_tag_of_a_wrong_type(number, kind, tmp_path):
    write_geojson(tmp_path / "good.geojson", box(0, 0, 5, 5, "Tumor"))
    outcome(tmp_path, "x.tif", tiff(tmp_path, tag_type(number, kind)))


@pytest.mark.parametrize("kind", ["geojson", "png", "tif"])
def test_flipped_bits_raise_nothing_else(kind, tmp_path):
    """Anywhere, or in the head of the file."""
    write_geojson(tmp_path / "good.geojson", box(0, 0, 5, 5, "Tumor"))
    whole = {
        "geojson": json.dumps([box(0, 0, 50, 50, "Tumor"), area([SQUARE], "Stroma")]).encode(),
        "png": imagecodecs.png_encode(MASK),
        "tif": tiff(tmp_path, lambda data: None),
    }[kind]
    draw, counts = random.Random(5), dict.fromkeys(("drawn", "refused", "refused when drawn", "unnamed"), 0)
    for turn in range(120):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 1, 2, 8))):
            place = draw.randrange(8 * min(len(data), 400 if turn % 2 else len(data)))
            data[place // 8] ^= 1 << place % 8
        counts[outcome(tmp_path, f"x.{kind}", bytes(data))] += 1
    assert counts["refused"] > 5
    assert outcome(tmp_path, f"x.{kind}", whole) == "drawn"


def test_names_are_fit_to_be_printed(tmp_path):
    write_geojson(tmp_path / "a.geojson", box(0, 0, 5, 5, "Tu\x1b[31mmor\n\ud800\0 x"), box(0, 0, 5, 5, "\n "))
    classes = annotations_of(tmp_path).classes
    assert classes == ("background", "Tu\\x1b[31mmor \\ud800\\x00 x", "foreground")
    "".join(classes).encode()


def test_a_polygon_that_would_fill_the_memory(tmp_path):
    zigzag = [(k % 2 * 1e3 + k / 1e5, k % 2 * 1e6) for k in range(100_000)]
    write_geojson(tmp_path / "x.geojson", area([zigzag], "Tumor"))
    with pytest.raises(SlideError, match=r"x\.geojson is damaged .*crossings of edges"):
        mask_of(annotations_of(tmp_path), "x", blank_slide(4096, 4096), Region(0, 0, 2048, 2048, 0.5))


@pytest.mark.parametrize(
    ("content", "words"), [(b"1 T\xfcmor", "must be a text file in UTF-8"), (b"9" * 5000 + b" a", "line 1: expected")]
)
def test_a_names_file_that_cannot_be_read_is_named(tmp_path, content, words):
    (tmp_path / "x.png").write_bytes(imagecodecs.png_encode(MASK))
    (tmp_path / "classes.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"classes\.txt {words}"):
        annotations_in(tmp_path, "x")


def test_links_that_go_round_are_followed_once(tmp_path):
    """Two of them once kept the command walking for ever."""
    write_geojson(tmp_path / "a.geojson", box(0, 0, 5, 5, "Tumor"))
    for name in ("round", "and_round"):
        (tmp_path / name).symlink_to(tmp_path, target_is_directory=True)
    assert set(annotations_in(tmp_path, "a").paths) == {"a"}
