"""Damaged slides: one message each, no crash, no black tile taken for tissue."""

import errno
import os
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openslide
import pytest

from pipelines.backends import openslide as openslide_backend
from pipelines.backends.registry import open_slide
from pipelines.backends.tiff_page import Tag
from pipelines.slides.geometry import Region
from pipelines.slides.slide import PADDING, SlideError, TileReadError
from tests.helpers.openslide_pixels import openslide_pixels
from tests.helpers.real import PYRAMID_TIFF, SVS
from tests.helpers.tiff_damage import tile_extent, with_bit_rot, with_bytes, with_tile_entry

SIDE = 240
TILE = 65
"""Column 5, row 6 of a grid of 10 columns."""
BAD = Region(5 * SIDE + 10, 6 * SIDE + 10, 100, 100, 0.499)
GOOD = Region(2 * SIDE, 2 * SIDE, 300, 300, 0.499)


@pytest.fixture(scope="module")
def good_pixels():
    with open_slide(SVS) as slide:
        return slide.read(GOOD)


def read_all(path, backend="auto"):
    with open_slide(path, backend=backend) as slide:
        return slide.read(Region(0, 0, slide.levels[0].width, slide.levels[0].height, slide.mpp))


def damaged(kind, target):
    """The SVS with one tile damaged."""
    offset, count = tile_extent(SVS, TILE)
    match kind:
        case "zeroed":
            return with_bytes(SVS, target, offset, bytes(count))
        case "bit rot":
            return with_bytes(SVS, target, offset + count // 2, b"\xff\x00\x5a\xff\xd9" * 12 + b"\xff" * 4)
        case "another size":
            size = SVS.read_bytes().index(struct.pack(">HH", SIDE, SIDE), offset)
            return with_bytes(SVS, target, size, struct.pack(">HH", SIDE - 8, SIDE))
        case "never written":  # as sparse TIFF files leave out background
            without_bytes = with_tile_entry(SVS, target, TILE, tag=Tag.TILE_BYTES, value=0)
            return with_tile_entry(without_bytes, target, TILE, tag=Tag.TILE_OFFSETS, value=0)
    value = {"end missing": count // 2, "no bytes": 0, "4 GiB": 0xFFFFFFF0}[kind]
    return with_tile_entry(SVS, target, TILE, tag=Tag.TILE_BYTES, value=value)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *(("tiled", kind) for kind in ("zeroed", "bit rot", "another size", "end missing", "no bytes", "4 GiB")),
        ("openslide", "zeroed"),
        ("openslide", "bit rot"),
    ],
)
def test_a_bad_tile_is_named_and_the_others_are_read(tmp_path, backend, kind, good_pixels):
    path = damaged(kind, tmp_path / "slide.svs")
    place = rf"level 0, tile column 5, row 6 \(\d+ bytes at offset {tile_extent(SVS, TILE)[0]}\)"
    with open_slide(path, backend=backend) as slide:
        for _ in range(3):  # an OpenSlide handle would stay failed after the first
            with pytest.raises(TileReadError, match=f"{path}: {place if backend == 'tiled' else ''}"):
                slide.read(BAD)
            np.testing.assert_array_equal(slide.read(GOOD), good_pixels)


def test_a_bad_tile_disturbs_no_other_thread(tmp_path, good_pixels):
    with open_slide(damaged("zeroed", tmp_path / "slide.svs"), backend="openslide") as slide:

        def read(i):
            try:
                pixels = slide.read(BAD if i % 3 == 0 else GOOD)
            except TileReadError:
                return "failed"
            return "same" if np.array_equal(pixels, good_pixels) else "different"

        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(read, range(60)))
    assert got == ["failed" if i % 3 == 0 else "same" for i in range(60)]


def test_a_share_that_fails_is_no_damage(monkeypatch, good_pixels):
    """Squares of a slide were left out for ever after a share had failed for a moment."""

    def pread(*arguments):
        raise OSError(errno.ESTALE, "Stale file handle")

    with open_slide(SVS) as slide:
        with monkeypatch.context() as outage:
            outage.setattr(os, "pread", pread)
            with pytest.raises(SlideError, match=r"level 0, .* Stale file handle; check the disk or share") as error:
                slide.read(GOOD)
        assert not isinstance(error.value, TileReadError)
        np.testing.assert_array_equal(slide.read(GOOD), good_pixels)


@pytest.mark.parametrize(("kind", "count"), [("no bytes", 0), ("4 GiB", 0xFFFFFFF0)])
def test_an_impossible_byte_count_never_reaches_openslide(tmp_path, kind, count, monkeypatch):
    monkeypatch.setattr(openslide_backend, "OpenSlide", lambda path: pytest.fail(f"OpenSlide was given {path}"))
    with pytest.raises(SlideError, match=f"not handed to OpenSlide: .*tile 65 .*{count} bytes"):
        open_slide(damaged(kind, tmp_path / "slide.svs"), backend="openslide")


@pytest.mark.parametrize("backend", ["tiled", "openslide"])
def test_a_tile_that_was_never_written_is_white(tmp_path, backend, good_pixels):
    with open_slide(damaged("never written", tmp_path / "slide.svs"), backend=backend) as slide:
        assert (slide.read(BAD) == PADDING).all()
        np.testing.assert_array_equal(slide.read(GOOD), good_pixels)


def test_bit_rot_fails_at_least_where_openslide_fails(tmp_path):
    """Direct decode also hears the warnings that come with the end of an image, for which OpenSlide does not wait.

    Rot that decodes without any warning goes unseen by both: no decoder can tell it from an image.
    """
    ours_failed, theirs_failed = set(), set()
    region = Region(4 * SIDE, 4 * SIDE, SIDE, SIDE, 0.499)
    for seed in range(20):
        path = with_bit_rot(SVS, tmp_path / "rot.svs", tile=44, seed=seed)
        try:
            theirs = openslide_pixels(path, region.l0_x, region.l0_y, SIDE, SIDE)
        except openslide.OpenSlideError:
            theirs_failed.add(seed)
        with open_slide(path, backend="tiled") as slide:
            try:
                ours = slide.read(region)
            except TileReadError:
                ours_failed.add(seed)
            else:
                np.testing.assert_array_equal(ours, theirs)
    assert theirs_failed < ours_failed
    assert len(ours_failed) >= 15


@pytest.mark.parametrize("backend", ["tiled", "openslide"])
@pytest.mark.parametrize(
    ("new", "words"),
    [
        (b"|MPP = 0.0000", "records 0 um/px"),
        (b"|XXX = 0.4990", "does not record its um/px"),
        (b"|MPP = 499.00", "records 499 um/px"),
    ],
)
def test_missing_or_absurd_mpp_names_the_override(tmp_path, new, words, backend):
    path = with_bytes(SVS, tmp_path / "slide.svs", SVS.read_bytes().index(b"|MPP = 0.4990"), new)
    with pytest.raises(SlideError, match=rf"{words}.*--slide-mpp.*`mpp`"):
        open_slide(path, backend=backend)
    with open_slide(path, mpp=0.5, backend=backend) as slide:
        assert slide.mpp == 0.5


@pytest.mark.parametrize("mpp", [0.0, -1.0, 0.001, 1000.0, float("nan")])
def test_an_absurd_override_is_refused(mpp):
    with pytest.raises(ValueError, match=r"must be 0\.05 to 100 um/px"):
        open_slide(SVS, mpp=mpp)


@pytest.mark.parametrize("backend", ["auto", "tiled", "openslide"])
@pytest.mark.parametrize(
    ("source", "part"), [(SVS, 0.1), (SVS, 0.5), *((PYRAMID_TIFF, part) for part in (0.1, 0.2, 0.5, 0.8, 0.95))]
)
def test_a_file_cut_short_is_refused(tmp_path, source, part, backend):
    path = tmp_path / source.name
    path.write_bytes(source.read_bytes()[: int(source.stat().st_size * part)])
    with pytest.raises(SlideError, match=f"{path}: .*cut short"):
        read_all(path, backend)


def test_a_cut_behind_all_levels_is_logged_and_never_reaches_openslide(tmp_path, caplog):
    path = tmp_path / "slide.svs"
    path.write_bytes(SVS.read_bytes()[: int(SVS.stat().st_size * 0.9)])
    np.testing.assert_array_equal(read_all(path), read_all(SVS))
    assert "cut short" in caplog.text
    with pytest.raises(SlideError, match=r"not handed to OpenSlide: .*cut short"):
        open_slide(path, backend="openslide")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.svs", b"", "the file is empty"),
        ("a.svs", b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>", "the content is HTML, not a slide"),
        ("a.png", b" <html>", "the content is HTML"),
        ("a.png", b"plain\n", "the content is text"),
        ("a.png", b"PK\x03\x04", "the content is ZIP"),
        ("a.svs", np.random.default_rng(0).bytes(5000), "no backend knows this format"),
    ],
    ids=["empty", "web page", "html", "text", "zip", "noise"],
)
def test_what_is_no_slide_is_named_with_what_each_backend_said(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SlideError, match=words) as error:
        open_slide(tmp_path / name, mpp=0.5)
    if content and name == "a.svs":
        for backend in ("tiled", "ndpi", "zarr", "openslide", "image"):
            assert f"\n  {backend}: " in str(error.value)
        assert str(error.value).count("\n") == 5


@pytest.mark.parametrize("name", ["slide.svs", "slide.png", "slide.dcm", "slide.ndpi", "slide.vms"])
@pytest.mark.parametrize("secret", [b"no slide\n", b"hunter2 = 1\nmore", b"\x01hunter2\0\0" * 9, b"II*\0hunter2" * 9])
def test_a_message_never_quotes_what_a_link_leads_to(tmp_path, name, secret):
    (tmp_path / "secret").write_bytes(secret)
    (tmp_path / name).symlink_to(tmp_path / "secret")
    with pytest.raises(SlideError) as error, open_slide(tmp_path / name, mpp=0.5) as slide:
        slide.read(Region(0, 0, 8, 8, 0.5))
    assert "hunter2" not in str(error.value)
    assert "begins with '" not in str(error.value)


def test_no_file_a_pipe_and_backends_that_do_not_fit(tmp_path):
    with pytest.raises(SlideError, match="no such file"):
        open_slide(tmp_path / "slide.svs")
    os.mkfifo(tmp_path / "pipe.svs")
    with pytest.raises(SlideError, match="neither a file nor a folder"):
        open_slide(tmp_path / "pipe.svs")
    with pytest.raises(ValueError, match="backend must be one of auto, tiled"):
        open_slide(SVS, backend="cucim")
    with pytest.raises(SlideError, match="not readable with --backend zarr"):
        open_slide(SVS, backend="zarr")
