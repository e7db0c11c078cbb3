"""What is particular to the OpenSlide backend: blending, bands, bounds, levels that do not divide evenly."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openslide import OpenSlide, lowlevel

from pipelines.backends import openslide as openslide_backend
from pipelines.backends.openslide import _rgb_on_white
from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import SlideError
from tests.helpers.real import NDPI, PYRAMID_TIFF, SVS
from tests.pipelines.backends.test_slides import openslide_pixels


@given(st.integers(0, 255), st.tuples(*[st.floats(0, 1)] * 3))
def test_premultiplied_argb_onto_white(alpha: int, colour: tuple[float, ...]) -> None:
    premultiplied = [round(c * alpha) for c in colour]
    word = alpha << 24 | premultiplied[0] << 16 | premultiplied[1] << 8 | premultiplied[2]
    out = np.zeros((2, 3, 3), np.uint8)
    argb = np.full((2, 3), 0xFF102030, np.uint32)
    argb[1, 1] = word
    _rgb_on_white(argb, out)
    assert out[1, 1].tolist() == [c + 255 - alpha for c in premultiplied]
    assert out[0, 0].tolist() == [0x10, 0x20, 0x30]


def test_the_private_reader_draws_what_the_public_one_draws() -> None:
    """Fails if a new openslide-python changes ``lowlevel._read_region``; then its version bound has to stay."""
    argb = np.empty((70, 90), np.uint32)
    with OpenSlide(SVS) as slide:
        pointer = argb.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32))
        lowlevel._read_region(slide._osr, pointer, 101, 203, 0, 90, 70)
        public = np.asarray(slide.read_region((101, 203), 0, (90, 70)))
    assert public[..., 3].min() == 255
    np.testing.assert_array_equal(argb.view(np.uint8).reshape(70, 90, 4)[..., 2::-1], public[..., :3])


@pytest.mark.parametrize("band_bytes", [1, 100_000])
def test_bands_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch, band_bytes: int) -> None:
    monkeypatch.setattr(openslide_backend, "BAND_BYTES", band_bytes)
    whole = openslide_pixels(SVS)
    with open_slide(SVS, backend="openslide") as slide:
        got = slide.read(Region(101, 203, 700, 900, slide.mpp))
    np.testing.assert_array_equal(got, whole[203:1103, 101:801])


def test_levels_that_do_not_divide_evenly_are_at_most_a_quarter_px_off() -> None:
    """OpenSlide takes positions in whole level-0 px, and this level's downsample is 2.0003."""
    expected = openslide_pixels(PYRAMID_TIFF, 1)
    with open_slide(PYRAMID_TIFF, backend="openslide") as slide:
        for x, y in ((100, 200), (700, 900), (333, 1111)):
            got = slide.read(Region(2 * x, 2 * y, 200, 200, slide.levels[1].mpp))
            difference = np.abs(got.astype(int) - expected[y : y + 200, x : x + 200])
            here = expected[y : y + 201, x : x + 201].astype(int)
            step_to_next_px = sum(np.abs(np.diff(here, axis=axis)).mean() for axis in (0, 1))
            assert difference.mean() < 0.25 * step_to_next_px + 0.5


class WithProperties:
    """OpenSlide with other properties than the file's."""

    changes: dict[str, str]

    def __init__(self, path: Any) -> None:
        from openslide import OpenSlide

        self._slide = OpenSlide(path)
        self.properties = dict(self._slide.properties) | self.changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slide, name)


def with_properties(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    changed = {f"openslide.{name.replace('_', '-')}": value for name, value in changes.items()}
    monkeypatch.setattr(openslide_backend, "OpenSlide", type("Changed", (WithProperties,), {"changes": changed}))


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    with_properties(monkeypatch, bounds_x="10", bounds_y="20", bounds_width="300", bounds_height="400")
    with open_slide(NDPI, backend="openslide") as slide:
        assert slide.bounds == Bounds(10, 20, 300, 400)


def test_bounds_are_the_whole_slide_when_the_file_has_none() -> None:
    with open_slide(NDPI, backend="openslide") as slide:
        assert slide.bounds == Bounds(0, 0, 3968, 4864)


@pytest.mark.parametrize(
    ("mpp_x", "mpp_y", "mpp", "error"),
    [
        ("0.25", "0.26", 0.255, None),
        ("0.25", "0.50", None, r"records 0\.25 um/px in x and 0\.5 in y; pixels must be square within 5%"),
        ("nan", "nan", None, "records nan um/px"),
        ("", "0,25", None, "does not record its um/px"),
    ],
)
def test_mpp_of_both_axes(
    monkeypatch: pytest.MonkeyPatch, mpp_x: str, mpp_y: str, mpp: float | None, error: str | None
) -> None:
    with_properties(monkeypatch, mpp_x=mpp_x, mpp_y=mpp_y)
    if error is None:
        with open_slide(SVS, backend="openslide") as slide:
            assert slide.mpp == pytest.approx(mpp)
    else:
        with pytest.raises(SlideError, match=error):
            open_slide(SVS, backend="openslide")
