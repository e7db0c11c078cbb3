"""Collections: labels, patients, growing, refusing other files; painting: bytes of the seed alone, levels, memory."""

from __future__ import annotations

import csv
import dataclasses
import errno
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import openslide
import pytest
import tifffile

from pipelines.backends.registry import open_slide
from pipelines.backends.tiff_writer import TiffWriter, level_sizes
from pipelines.slides.geometry import Region, Size
from pipelines.synthetic.collection import MASK_SCALE, OVERVIEW, Collection, make_collection, paint, planned
from pipelines.synthetic.tissue import BLOCK, Arrangement, Scene, SceneSpec

SMALL = Collection("classify", 4, 600, 7, 0.5)


def _make(collection: Collection, out: Path) -> int:
    return make_collection(collection, out, workers=1, report=lambda slide, done, total: None)


def test_classes_and_patients_are_even() -> None:
    plan = planned(dataclasses.replace(SMALL, slides=100))
    for n in range(2, 101, 2):
        labels = Counter(slide.label for slide in plan[:n])
        assert abs(labels["crowded"] - labels["sparse"]) <= 0
    classes = {patient: {s.label for s in plan if s.patient == patient} for patient in {s.patient for s in plan}}
    assert all(len(labels) == 1 for labels in classes.values())
    assert set(Counter(slide.patient for slide in plan).values()) == {1, 2}


def test_a_collection_grows_without_changing(tmp_path: Path) -> None:
    assert _make(dataclasses.replace(SMALL, slides=2), tmp_path) == 2
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.tif")}
    assert _make(SMALL, tmp_path) == 2
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    with (tmp_path / "labels.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [row["slide"] for row in rows] == [f"slide_{k:04d}" for k in range(4)]
    assert {row["label"] for row in rows} == {"crowded", "sparse"}
    assert _make(dataclasses.replace(SMALL, slides=1), tmp_path) == 0
    assert len((tmp_path / "labels.csv").read_text().splitlines()) == 5


def test_segment_writes_masks_and_patients_and_no_labels(tmp_path: Path) -> None:
    _make(Collection("segment", 1, 1000, 7, 0.5), tmp_path)
    mask = tifffile.imread(tmp_path / "annotations" / "slide_0000.tif")
    assert set(mask.ravel()) == {0, 1}
    assert (tmp_path / "annotations" / "classes.txt").read_text() == "0 background\n1 gland\n"
    assert (tmp_path / "labels.csv").read_text().startswith("slide,patient\n")


def test_another_collection_is_refused(tmp_path: Path) -> None:
    _make(dataclasses.replace(SMALL, slides=1), tmp_path)
    for field, value in {"seed": 8, "size": 700, "mpp": 0.25, "task": "segment"}.items():
        with pytest.raises(ValueError, match=f"other artificial slides \\({field} "):
            _make(dataclasses.replace(SMALL, slides=1, **{field: value}), tmp_path)


def test_someone_elses_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slide_0001.tif").write_bytes(b"a real slide")
    with pytest.raises(ValueError, match=r"slide_0001\.tif is there already and was not made by app\.synth"):
        _make(SMALL, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["slide_0001.tif"]


def test_a_full_disk_leaves_whole_slides_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tile = TiffWriter.write_tile
    written = Counter[str]()

    def until_full(self: object, *tile: object) -> None:
        written["tiles"] += 1
        if written["tiles"] > 15:  # a slide of 600 px has 9 tiles on level 0 and 4 on level 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write_tile(self, *tile)

    monkeypatch.setattr(TiffWriter, "write_tile", until_full)
    with pytest.raises(OSError, match="is full"):
        _make(SMALL, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.csv", "slide_0000.tif", "synthetic.json"]
    monkeypatch.undo()
    assert _make(SMALL, tmp_path) == 3


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(OSError, match="cannot be written"):
        _make(SMALL, tmp_path / "out")


def _paint(path: Path, mask: Path | None = None, workers: int = 1, size: Size = Size(2600, 1300)) -> Scene:  # noqa: B008 - frozen
    scene = Scene(SceneSpec(0, 5, size, Arrangement(0.8)))
    paint(scene, path, mask, mpp=0.5, description="", workers=workers)
    return scene


def test_the_number_of_threads_does_not_show(tmp_path: Path) -> None:
    for workers in (1, 3):
        _paint(tmp_path / f"{workers}.tif", tmp_path / f"{workers}_mask.tif", workers, Size(700, 600))
    for kind in ("", "_mask"):
        assert (tmp_path / f"1{kind}.tif").read_bytes() == (tmp_path / f"3{kind}.tif").read_bytes()


def test_slide_and_mask_hold_what_was_drawn(tmp_path: Path) -> None:
    path, mask_path = tmp_path / "s.tif", tmp_path / "m.tif"
    scene = _paint(path, mask_path)
    block = scene.draw(2, 1)
    with open_slide(path) as slide:
        seen = slide.read(Region(2 * BLOCK, BLOCK, BLOCK, BLOCK, 0.5))
    assert np.abs(seen.astype(int) - block.pixels).mean() < 4  # JPEG
    mask = tifffile.imread(mask_path)
    assert mask.shape == (1300 // MASK_SCALE, 2600 // MASK_SCALE)
    side = BLOCK // MASK_SCALE
    part = mask[side : 2 * side, 2 * side : 3 * side].repeat(MASK_SCALE, 0).repeat(MASK_SCALE, 1)
    inside = block.mask > 0
    assert (part[inside] > 0).mean() > 0.98
    assert (part[~inside] == 0).mean() > 0.98


def test_every_level_is_the_mean_of_the_one_before(tmp_path: Path) -> None:
    size = Size(4200, 1100)
    _paint(tmp_path / "s.tif", size=size)
    slide = openslide.OpenSlide(tmp_path / "s.tif")
    sizes = level_sizes(size, OVERVIEW)
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
    assert len(level_sizes(Size(side, side), OVERVIEW)) == levels


def test_a_small_slide_of_one_level(tmp_path: Path) -> None:
    _paint(tmp_path / "s.tif", size=Size(512, 512))
    with open_slide(tmp_path / "s.tif") as slide:
        assert [(level.width, level.height) for level in slide.levels] == [(512, 512)]


TALL = """
import sys
from pathlib import Path
from pipelines.slides.geometry import Size
from pipelines.synthetic.collection import paint
from pipelines.synthetic.tissue import Arrangement, Scene, SceneSpec
scene = Scene(SceneSpec(0, 1, Size(2048, int(sys.argv[1])), Arrangement(0.8)))
paint(scene, Path(sys.argv[2]), None, mpp=0.5, description="", workers=2)
# Not ru_maxrss: it starts from what the process that started this one held.
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.process
def test_memory_does_not_grow_with_the_height(tmp_path: Path) -> None:
    """60 Mpx are 184 MB as pixels; drawing them may take a few MB more than drawing 2 Mpx."""
    peaks = [
        int(
            subprocess.run(
                [sys.executable, "-c", TALL, str(height), tmp_path / "s.tif"], capture_output=True, check=True
            ).stdout
        )
        for height in (1024, 30_000)
    ]
    assert peaks[1] < 600e6
    assert peaks[1] - peaks[0] < 50e6
