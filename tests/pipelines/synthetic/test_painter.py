"""Painting: bytes that depend on nothing but the seed, levels that are means of each other, bounded memory."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import openslide
import pytest
import tifffile

from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Region, Size
from pipelines.synthetic.arrangement import CROWDED
from pipelines.synthetic.painter import MASK_SCALE, level_sizes, paint
from pipelines.synthetic.scene import Scene, SceneSpec


def _paint(path: Path, mask: Path | None = None, workers: int = 1, size: Size = Size(2600, 1300)) -> Scene:  # noqa: B008 - frozen
    scene = Scene(SceneSpec(0, 5, size, CROWDED))
    paint(scene, path, mask, mpp=0.5, description="", workers=workers, progress=lambda done, total: None)
    return scene


def test_the_number_of_threads_does_not_show(tmp_path: Path) -> None:
    for workers in (1, 3):
        _paint(tmp_path / f"{workers}.tif", tmp_path / f"{workers}_mask.tif", workers, Size(700, 600))
    for kind in ("", "_mask"):
        assert (tmp_path / f"1{kind}.tif").read_bytes() == (tmp_path / f"3{kind}.tif").read_bytes()


def test_slide_and_mask_hold_what_was_drawn(tmp_path: Path) -> None:
    path, mask_path = tmp_path / "s.tif", tmp_path / "m.tif"
    scene = _paint(path, mask_path)
    block = scene.draw(1, 0)
    with open_slide(path) as slide:
        seen = slide.read(Region(1024, 0, 1024, 1024, 0.5))
    assert np.abs(seen.astype(int) - block.pixels).mean() < 4  # JPEG
    mask = tifffile.imread(mask_path)
    assert mask.shape == (1300 // MASK_SCALE, 2600 // MASK_SCALE)
    part = (
        mask[: 1024 // MASK_SCALE, 1024 // MASK_SCALE : 2048 // MASK_SCALE].repeat(MASK_SCALE, 0).repeat(MASK_SCALE, 1)
    )
    inside = block.mask > 0
    assert (part[inside] > 0).mean() > 0.98
    assert (part[~inside] == 0).mean() > 0.98


def test_every_level_is_the_mean_of_the_one_before(tmp_path: Path) -> None:
    size = Size(4200, 1100)
    _paint(tmp_path / "s.tif", size=size)
    slide = openslide.OpenSlide(tmp_path / "s.tif")
    sizes = level_sizes(size)
    assert slide.level_dimensions == tuple((level.width, level.height) for level in sizes)
    assert len(sizes) == 5
    levels = [
        np.asarray(slide.read_region((0, 0), level, dimensions))[..., :3]
        for level, dimensions in enumerate(slide.level_dimensions)
    ]
    slide.close()
    for finer, coarser in itertools.pairwise(levels):
        height, width = finer.shape[0] // 2, finer.shape[1] // 2
        mean = cv2.resize(finer[: 2 * height, : 2 * width], (width, height), interpolation=cv2.INTER_AREA)
        assert np.abs(mean.astype(int) - coarser[:height, :width]).mean() < 4


@pytest.mark.parametrize(("side", "levels"), [(512, 1), (513, 2), (1024, 2), (100_000, 9)])
def test_levels_go_down_to_an_overview(side: int, levels: int) -> None:
    assert len(level_sizes(Size(side, side))) == levels


def test_a_small_slide_of_one_level(tmp_path: Path) -> None:
    _paint(tmp_path / "s.tif", size=Size(512, 512))
    with open_slide(tmp_path / "s.tif") as slide:
        assert [(level.width, level.height) for level in slide.levels] == [(512, 512)]


WIDE = """
import sys
from pathlib import Path
from pipelines.slides.geometry import Size
from pipelines.synthetic.arrangement import EVEN
from pipelines.synthetic.painter import paint
from pipelines.synthetic.scene import Scene, SceneSpec
scene = Scene(SceneSpec(0, 1, Size(int(sys.argv[1]), 2048), EVEN))
paint(scene, Path(sys.argv[2]), None, mpp=0.5, description="", workers=2, progress=lambda done, total: None)
# Not ru_maxrss: it starts from what the process that started this one held.
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.process
def test_memory_does_not_grow_with_the_slide(tmp_path: Path) -> None:
    """60 Mpx are 184 MB as pixels; drawing them may take a few MB more than drawing 2 Mpx."""
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", WIDE, str(width), tmp_path / "s.tif"], capture_output=True, check=True
            ).stdout
        )
        for width in (1024, 30_000)
    ]
    assert peaks[1] < 600e6
    assert peaks[1] - peaks[0] < 100e6
