"""Damaged slides: one message each, no crash, no black tile taken for tissue."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pipelines.backends import openslide as openslide_backend
from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Region
from pipelines.slides.slide import PADDING, Slide, SlideError, TileReadError
from tests.helpers.damaged_svs import TILE, bit_rot, byte_count, cut, damaged, never_written_tile, replaced, zeroed_tile
from tests.helpers.real import PYRAMID_TIFF, SVS

BAD = Region(5 * TILE + 10, 6 * TILE + 10, 100, 100, 0.499)
GOOD = Region(2 * TILE, 2 * TILE, 300, 300, 0.499)


@pytest.fixture(scope="module")
def good_pixels() -> np.ndarray:
    with open_slide(SVS) as slide:
        return slide.read(GOOD)


@pytest.mark.parametrize("backend", ["tiled", "openslide"])
@pytest.mark.parametrize("change", [zeroed_tile, bit_rot])
def test_a_bad_tile_fails_alone(
    tmp_path: Path, change: Callable[[bytearray], None], backend: str, good_pixels: np.ndarray
) -> None:
    bad = BAD if change is zeroed_tile else Region(0, 0, 50, 50, 0.499)
    good = GOOD if change is zeroed_tile else Region(2 * TILE, 2 * TILE, 300, 300, 0.499)
    path = damaged(tmp_path, change)
    with open_slide(path, backend=backend) as slide:
        for _ in range(3):  # an OpenSlide handle would stay failed after the first
            with pytest.raises(TileReadError, match=str(path)):
                slide.read(bad)
            np.testing.assert_array_equal(slide.read(good), good_pixels)


def test_a_bad_tile_disturbs_no_other_thread(tmp_path: Path, good_pixels: np.ndarray) -> None:
    with open_slide(damaged(tmp_path, zeroed_tile), backend="openslide") as slide:

        def read(i: int) -> str:
            try:
                pixels = slide.read(BAD if i % 3 == 0 else GOOD)
            except TileReadError:
                return "failed"
            return "same" if np.array_equal(pixels, good_pixels) else "different"

        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(read, range(60)))
    assert got == ["failed" if i % 3 == 0 else "same" for i in range(60)]


@pytest.mark.parametrize("count", [0, 0xFFFFFFF0])
def test_an_impossible_byte_count_is_one_bad_tile_for_the_direct_reader(
    tmp_path: Path, count: int, good_pixels: np.ndarray
) -> None:
    with open_slide(damaged(tmp_path, byte_count(count))) as slide:
        assert slide.backend == "tiled"
        np.testing.assert_array_equal(slide.read(GOOD), good_pixels)
        with pytest.raises(TileReadError, match=f"column 5, row 6 \\({count} bytes"):
            slide.read(BAD)


@pytest.mark.parametrize("count", [0, 0xFFFFFFF0])
def test_an_impossible_byte_count_never_reaches_openslide(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openslide_backend, "OpenSlide", lambda path: pytest.fail(f"OpenSlide was given {path}"))
    with pytest.raises(SlideError, match=f"not handed to OpenSlide: .*tile 65 .*{count} bytes"):
        open_slide(damaged(tmp_path, byte_count(count)), backend="openslide")


@pytest.mark.parametrize("backend", ["tiled", "openslide"])
def test_a_tile_that_was_never_written_is_white(tmp_path: Path, backend: str, good_pixels: np.ndarray) -> None:
    with open_slide(damaged(tmp_path, never_written_tile), backend=backend) as slide:
        assert (slide.read(BAD) == PADDING).all()
        np.testing.assert_array_equal(slide.read(GOOD), good_pixels)


@pytest.mark.parametrize("backend", ["auto", "tiled", "openslide"])
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b"|MPP = 0.4990", b"|MPP = 0.0000", "records 0 um/px"),
        (b"|MPP = 0.4990", b"|XXX = 0.4990", "does not record its um/px"),
        (b"|MPP = 0.4990", b"|MPP = 499.00", "records 499 um/px"),
    ],
)
def test_missing_or_absurd_mpp_names_the_override(
    tmp_path: Path, old: bytes, new: bytes, said: str, backend: str
) -> None:
    path = damaged(tmp_path, replaced(old, new))
    with pytest.raises(SlideError, match=rf"{said}.*--slide-mpp.*column `mpp`"):
        open_slide(path, backend=backend)
    with open_slide(path, mpp=0.5, backend=backend) as slide:
        assert slide.mpp == 0.5


@pytest.mark.parametrize("backend", ["auto", "tiled", "openslide"])
@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_a_file_cut_short(tmp_path: Path, fraction: float, backend: str) -> None:
    path = damaged(tmp_path, cut(fraction))
    with pytest.raises(SlideError, match=f"{path}: .*cut short"):
        _read_all(path, backend)


def test_a_cut_that_only_takes_the_macro_image_leaves_the_slide_readable(
    tmp_path: Path, good_pixels: np.ndarray
) -> None:
    path = damaged(tmp_path, cut(0.9))
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read(GOOD), good_pixels)
    with pytest.raises(SlideError, match=r"not handed to OpenSlide: .*cut short"):
        open_slide(path, backend="openslide")


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.8, 0.95])
def test_a_pyramid_cut_short(tmp_path: Path, fraction: float) -> None:
    data = PYRAMID_TIFF.read_bytes()
    path = tmp_path / "cut.tif"
    path.write_bytes(data[: int(len(data) * fraction)])
    for backend in ("auto", "openslide"):
        with pytest.raises(SlideError):
            _read_all(path, backend)


def _read_all(path: Path, backend: str) -> None:
    with open_slide(path, backend=backend) as slide:
        slide.read(Region(0, 0, slide.levels[0].width, slide.levels[0].height, slide.mpp))


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_empty_file(tmp_path: Path) -> None:
    with pytest.raises(SlideError, match="the file is empty"):
        open_slide(_write(tmp_path / "slide.svs", b""))


def test_a_web_page_named_svs(tmp_path: Path) -> None:
    page = _write(tmp_path / "slide.svs", b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>")
    with pytest.raises(SlideError, match=r"the content is HTML, not a slide") as error:
        open_slide(page)
    for backend in ("tiled", "ndpi", "zarr", "openslide", "image"):
        assert f"\n  {backend}: " in str(error.value)


@pytest.mark.parametrize("name", ["slide.svs", "slide.png", "slide.dcm", "slide.ndpi", "slide.vms"])
@pytest.mark.parametrize("secret", [b"no slide\n", b"hunter2 = 1\nmore", b"\x01hunter2\0\0" * 9, b"II*\0hunter2" * 9])
def test_a_message_never_quotes_what_a_link_leads_to(tmp_path: Path, name: str, secret: bytes) -> None:
    (tmp_path / name).symlink_to(_write(tmp_path / "secret", secret))
    with pytest.raises(SlideError) as error, open_slide(tmp_path / name, mpp=0.5) as slide:
        slide.read(Region(0, 0, 8, 8, 0.5))
    assert "hunter2" not in str(error.value)
    assert "begins with '" not in str(error.value)


@pytest.mark.parametrize(("content", "kind"), [(b"plain\n", "text"), (b" <html>", "HTML"), (b"PK\x03\x04", "ZIP")])
def test_the_kind_of_other_content_is_named(tmp_path: Path, content: bytes, kind: str) -> None:
    with pytest.raises(SlideError, match=f"the content is {kind}, not a slide"):
        open_slide(_write(tmp_path / "slide.png", content), mpp=0.5)


def test_noise_says_what_each_backend_said(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes(5000)
    with pytest.raises(SlideError, match="no backend knows this format") as error:
        open_slide(_write(tmp_path / "slide.svs", noise))
    assert str(error.value).count("\n") == 5


def test_no_such_file_and_no_such_backend(tmp_path: Path) -> None:
    with pytest.raises(SlideError, match="there is no such file"):
        open_slide(tmp_path / "slide.svs")
    with pytest.raises(ValueError, match="backend must be one of auto, tiled"):
        open_slide(SVS, backend="cucim")


def test_a_forced_backend_that_does_not_know_the_file() -> None:
    with pytest.raises(SlideError, match="not readable with --backend zarr"):
        open_slide(SVS, backend="zarr")


@pytest.mark.parametrize("mpp", [0.0, -1.0, 0.001, 1000.0, float("nan")])
def test_an_absurd_override_is_refused(mpp: float) -> None:
    with pytest.raises(ValueError, match=r"must be 0\.05 to 100 um/px"):
        open_slide(SVS, mpp=mpp)


def test_random_damage_to_the_tags_never_crashes(tmp_path: Path) -> None:
    """Single bytes of the directories changed: the slide opens and reads, or says what is wrong."""
    rng = np.random.default_rng(7)
    whole = SVS.read_bytes()
    outcomes = {"read": 0, "refused": 0}
    for i in range(150):
        data = bytearray(whole)
        data[int(rng.integers(1_275_950, 1_277_900))] = int(rng.integers(256))
        path = _write(tmp_path / f"{i}.svs", bytes(data))
        try:
            slide: Slide
            with open_slide(path) as slide:
                slide.read(Region(0, 0, 700, 700, slide.mpp))
            outcomes["read"] += 1
        except SlideError:
            outcomes["refused"] += 1
        path.unlink()
    assert min(outcomes.values()) > 0, outcomes
