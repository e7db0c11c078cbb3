"""What every slide backend must do. Subclass it and give ``open_it`` and ``level_pixels``.

The expected pixels come from another reader, or from the arrays that the slide was made of; never from the backend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipelines.slides.geometry import Region
from pipelines.slides.slide import PADDING, Pixels, Slide, SlideError


class SlideContract:
    """Tests of one backend.

    Attributes:
        backend: what ``slide.backend`` must say.
        mpp: what level 0 must have.
    """

    backend: str
    mpp: float

    @staticmethod
    def open_it() -> Slide:
        """The slide, newly opened."""
        raise NotImplementedError

    @staticmethod
    def level_pixels() -> dict[int, Pixels]:
        """The true pixels of some levels, level 0 and the coarsest among them."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def truth(cls) -> dict[int, Pixels]:
        return cls.level_pixels()

    @pytest.fixture
    def slide(self) -> Iterator[Slide]:
        with self.open_it() as slide:
            yield slide

    def test_names_its_backend_and_mpp(self, slide: Slide) -> None:
        assert slide.backend == self.backend
        assert slide.mpp == pytest.approx(self.mpp, rel=1e-6)

    def test_levels_are_sorted_and_consistent(self, slide: Slide, truth: dict[int, Pixels]) -> None:
        assert [level.index for level in slide.levels] == list(range(len(slide.levels)))
        assert slide.levels[0].downsample == 1.0
        downsamples = [level.downsample for level in slide.levels]
        assert downsamples == sorted(downsamples)
        for level in slide.levels:
            assert level.mpp == pytest.approx(slide.mpp * level.downsample)
        for i, pixels in truth.items():
            assert (slide.levels[i].height, slide.levels[i].width) == pixels.shape[:2]

    def test_bounds_lie_in_level_0(self, slide: Slide) -> None:
        bounds, level = slide.bounds, slide.levels[0]
        assert 0 <= bounds.l0_x < bounds.l0_x + bounds.width <= level.width
        assert 0 <= bounds.l0_y < bounds.l0_y + bounds.height <= level.height

    def test_reading_at_a_levels_mpp_gives_its_pixels(self, slide: Slide, truth: dict[int, Pixels]) -> None:
        for i, pixels in truth.items():
            height, width = pixels.shape[:2]
            got = slide.read(Region(0, 0, width, height, slide.levels[i].mpp))
            assert got.dtype == np.uint8
            np.testing.assert_array_equal(got, pixels, err_msg=f"level {i}")

    def test_reading_at_odd_places_gives_the_pixels_there(self, slide: Slide, truth: dict[int, Pixels]) -> None:
        rng = np.random.default_rng(0)
        height, width = truth[0].shape[:2]
        for _ in range(20):
            w, h = int(rng.integers(1, min(300, width))), int(rng.integers(1, min(300, height)))
            x, y = int(rng.integers(0, width - w)), int(rng.integers(0, height - h))
            np.testing.assert_array_equal(slide.read(Region(x, y, w, h, slide.mpp)), truth[0][y : y + h, x : x + w])

    def test_outside_is_white_on_all_four_sides(self, slide: Slide, truth: dict[int, Pixels]) -> None:
        height, width = truth[0].shape[:2]
        left, top, right, bottom = 5, 7, 11, 3
        got = slide.read(Region(-left, -top, width + left + right, height + top + bottom, slide.mpp))
        expected = np.pad(truth[0], ((top, bottom), (left, right), (0, 0)), constant_values=PADDING)
        np.testing.assert_array_equal(got, expected)

    @pytest.mark.parametrize(("across", "down"), [(-1, 0), (1, 0), (0, -1), (0, 1), (3, 3), (-3, 3)])
    def test_far_outside_is_all_white(self, slide: Slide, across: int, down: int) -> None:
        level = slide.levels[0]
        region = Region(across * 3 * level.width, down * 3 * level.height, 40, 30, slide.mpp)
        assert (slide.read(region) == PADDING).all()
        assert (slide.read(Region(region.l0_x, region.l0_y, 40, 30, slide.levels[-1].mpp * 1.7)) == PADDING).all()

    def test_out_is_filled_and_returned(self, slide: Slide) -> None:
        region = Region(3, 5, 31, 17, slide.mpp)
        batch = np.zeros((2, 17, 31, 3), np.uint8)
        assert slide.read(region, out=batch[1]).base is batch
        np.testing.assert_array_equal(batch[1], slide.read(region))
        assert not batch[0].any()

    def test_out_may_be_part_of_a_larger_array(self, slide: Slide) -> None:
        for mpp in (slide.mpp, slide.levels[-1].mpp * 2, slide.levels[-1].mpp * 2.6):
            region = Region(3, 5, 12, 9, mpp)
            canvas = np.zeros((20, 30, 3), np.uint8)
            slide.read(region, out=canvas[4:13, 6:18])
            np.testing.assert_array_equal(canvas[4:13, 6:18], slide.read(region))
            canvas[4:13, 6:18] = 0
            assert not canvas.any()

    def test_wrong_out_is_refused(self, slide: Slide) -> None:
        region = Region(0, 0, 8, 6, slide.mpp)
        for wrong in (np.zeros((8, 6, 3), np.uint8), np.zeros((6, 8, 4), np.uint8), np.zeros((6, 8, 3), np.float32)):
            with pytest.raises(ValueError, match=r"out must be uint8 \(6, 8, 3\)"):
                slide.read(region, out=wrong)

    def test_finer_than_level_0_is_refused(self, slide: Slide) -> None:
        with pytest.raises(ValueError, match=f"ask for --mpp {slide.mpp:.4g} or coarser"):
            slide.read(Region(0, 0, 8, 8, slide.mpp / 2))

    @pytest.mark.parametrize("factor", [2, 3])
    def test_whole_number_reduction_is_the_mean_of_blocks(
        self, slide: Slide, truth: dict[int, Pixels], factor: int
    ) -> None:
        level = slide.levels[-1]
        pixels = truth[level.index]
        height, width = pixels.shape[0] // factor, pixels.shape[1] // factor
        blocks = pixels[: height * factor, : width * factor].reshape(height, factor, width, factor, 3)
        got = slide.read(Region(0, 0, width, height, level.mpp * factor))
        assert np.abs(got - blocks.mean(axis=(1, 3))).max() <= 0.5 + 1e-9

    def test_fractional_reduction_keeps_the_mean(self, slide: Slide, truth: dict[int, Pixels]) -> None:
        level = slide.levels[-1]
        pixels, factor = truth[level.index], 1.37
        width, height = math.floor(level.width / factor) - 2, math.floor(level.height / factor) - 2
        got = slide.read(Region(0, 0, width, height, level.mpp * factor))
        covered = pixels[: round(height * factor), : round(width * factor)]
        np.testing.assert_allclose(got.mean(axis=(0, 1)), covered.mean(axis=(0, 1)), atol=0.7)

    def test_eight_threads_read_what_one_reads(self, slide: Slide) -> None:
        rng = np.random.default_rng(1)
        level = slide.levels[0]
        regions = [
            Region(int(x), int(y), 150, 110, float(mpp))
            for x, y, mpp in zip(
                rng.integers(-60, level.width, 64),
                rng.integers(-60, level.height, 64),
                rng.choice([slide.mpp, slide.mpp * 2.2, slide.levels[-1].mpp], 64),
                strict=True,
            )
        ]
        alone = [slide.read(region) for region in regions]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(slide.read, regions))
        for region, a, b in zip(regions, alone, together, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(region))

    def test_the_context_closes_and_a_closed_slide_refuses_to_read(self) -> None:
        with self.open_it() as slide:
            slide.read(Region(0, 0, 4, 4, slide.mpp))
        with pytest.raises(SlideError, match="is closed"):
            slide.read(Region(0, 0, 4, 4, slide.mpp))
        slide.close()  # a second time changes nothing
