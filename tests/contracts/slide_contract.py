"""What every slide backend must do. Subclass it and give ``open_it`` and ``level_pixels``.

The expected pixels come from another reader, or from the arrays that the slide was made of; never from the backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipelines.slides.geometry import Region
from pipelines.slides.slide import PADDING, Pixels, Slide, SlideError

MARGIN = 60


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

    def test_backend_levels_and_bounds(self, slide: Slide, truth: dict[int, Pixels]) -> None:
        assert slide.backend == self.backend
        assert slide.mpp == pytest.approx(self.mpp, rel=1e-6)
        assert [level.index for level in slide.levels] == list(range(len(slide.levels)))
        downsamples = [level.downsample for level in slide.levels]
        assert downsamples == sorted(downsamples)
        assert downsamples[0] == 1.0
        assert [level.mpp for level in slide.levels] == pytest.approx([slide.mpp * each for each in downsamples])
        for i, pixels in truth.items():
            assert (slide.levels[i].height, slide.levels[i].width) == pixels.shape[:2]
        bounds, level = slide.bounds, slide.levels[0]
        assert 0 <= bounds.l0_x < bounds.l0_x + bounds.width <= level.width
        assert 0 <= bounds.l0_y < bounds.l0_y + bounds.height <= level.height

    def test_reading_at_a_levels_mpp_gives_its_pixels(self, slide: Slide, truth: dict[int, Pixels]) -> None:
        for i, pixels in truth.items():
            height, width = pixels.shape[:2]
            got = slide.read(Region(0, 0, width, height, slide.levels[i].mpp))
            assert got.dtype == np.uint8
            np.testing.assert_array_equal(got, pixels, err_msg=f"level {i}")

    def test_any_region_has_the_pixels_there_and_white_outside(self, slide: Slide, truth: dict[int, Pixels]) -> None:
        height, width = truth[0].shape[:2]
        padded = np.pad(truth[0], ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=PADDING)
        rng = np.random.default_rng(0)
        boxes = [(-5, -7, width + 16, height + 10)]
        for _ in range(30):
            w, h = int(rng.integers(1, min(300, width))), int(rng.integers(1, min(300, height)))
            x, y = (int(rng.integers(-MARGIN, side + MARGIN - part)) for side, part in ((width, w), (height, h)))
            boxes.append((x, y, w, h))
        for x, y, w, h in boxes:
            expected = padded[y + MARGIN : y + MARGIN + h, x + MARGIN : x + MARGIN + w]
            got = slide.read(Region(x, y, w, h, slide.mpp))
            np.testing.assert_array_equal(got, expected, err_msg=str((x, y, w, h)))

    def test_far_outside_is_all_white(self, slide: Slide) -> None:
        level = slide.levels[0]
        for across, down in ((-1, 0), (1, 0), (0, -1), (0, 1), (3, 3), (-3, 3)):
            for mpp in (slide.mpp, slide.levels[-1].mpp * 1.7):
                region = Region(across * 3 * level.width, down * 3 * level.height, 40, 30, mpp)
                assert (slide.read(region) == PADDING).all()

    def test_out_is_filled_also_as_part_of_a_larger_array(self, slide: Slide) -> None:
        for mpp in (slide.mpp, slide.levels[-1].mpp * 2, slide.levels[-1].mpp * 2.6):
            region = Region(3, 5, 12, 9, mpp)
            canvas = np.zeros((20, 30, 3), np.uint8)
            assert slide.read(region, out=canvas[4:13, 6:18]).base is canvas
            np.testing.assert_array_equal(canvas[4:13, 6:18], slide.read(region))
            canvas[4:13, 6:18] = 0
            assert not canvas.any()

    def test_wrong_out_and_too_fine_an_mpp_are_refused(self, slide: Slide) -> None:
        region = Region(0, 0, 8, 6, slide.mpp)
        for wrong in (np.zeros((8, 6, 3), np.uint8), np.zeros((6, 8, 4), np.uint8), np.zeros((6, 8, 3), np.float32)):
            with pytest.raises(ValueError, match=r"out must be uint8 \(6, 8, 3\)"):
                slide.read(region, out=wrong)
        with pytest.raises(ValueError, match=f"--mpp {slide.mpp:.4g} or coarser"):
            slide.read(Region(0, 0, 8, 8, slide.mpp / 2))

    def test_whole_number_reduction_is_the_mean_of_blocks(self, slide: Slide, truth: dict[int, Pixels]) -> None:
        level = slide.levels[-1]
        pixels = truth[level.index]
        for factor in (2, 3):
            height, width = pixels.shape[0] // factor, pixels.shape[1] // factor
            blocks = pixels[: height * factor, : width * factor].reshape(height, factor, width, factor, 3)
            got = slide.read(Region(0, 0, width, height, level.mpp * factor))
            assert np.abs(got - blocks.mean(axis=(1, 3))).max() <= 0.5 + 1e-9

    def test_eight_threads_read_what_one_reads(self, slide: Slide) -> None:
        rng = np.random.default_rng(1)
        level = slide.levels[0]
        mpps = rng.choice([slide.mpp, slide.mpp * 2.2, slide.levels[-1].mpp], 64)
        places = zip(rng.integers(-60, level.width, 64), rng.integers(-60, level.height, 64), mpps, strict=True)
        regions = [Region(int(x), int(y), 150, 110, float(mpp)) for x, y, mpp in places]
        alone = [slide.read(region) for region in regions]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(slide.read, regions))
        for region, a, b in zip(regions, alone, together, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(region))

    def test_a_closed_slide_refuses_to_read(self) -> None:
        with self.open_it() as slide:
            slide.read(Region(0, 0, 4, 4, slide.mpp))
        with pytest.raises(SlideError, match="is closed"):
            slide.read(Region(0, 0, 4, 4, slide.mpp))
        slide.close()  # a second time changes nothing
