"""Collections of synthetic slides, how they are painted and what tissue they show; rows of the benchmark."""

import csv
import dataclasses
import errno
import itertools
import operator
import subprocess
import sys
from collections import Counter

import cv2
import numpy as np
import openslide
import pytest
import tifffile

from benchmarks.tile_size.row_slides import EVEN, GROUPED, SMALL_WINDOW
from pipelines.backends.registry import open_slide
from pipelines.backends.tiff_writer import encode_jpeg, level_sizes
from pipelines.slides.geometry import Region, Size
from pipelines.synthetic.collection import MASK_SCALE, OVERVIEW, Collection, make_collection, paint, planned
from pipelines.synthetic.tissue import BLOCK, HALO, Arrangement, Scene

SMALL = Collection("classify", 4, 600, 7, 0.5)


def make(out, **changes):
    return make_collection(dataclasses.replace(SMALL, **changes), out, workers=1, report=lambda *progress: None)


def test_classes_and_patients_are_even():
    plan = planned(dataclasses.replace(SMALL, slides=100))
    for n in range(2, 101, 2):
        labels = Counter(slide.label for slide in plan[:n])
        assert labels["crowded"] == labels["sparse"]
    by_patient = {patient: {s.label for s in plan if s.patient == patient} for patient in {s.patient for s in plan}}
    assert all(len(labels) == 1 for labels in by_patient.values())
    assert set(Counter(slide.patient for slide in plan).values()) == {1, 2}


def test_a_collection_grows_without_changing_and_is_not_mixed_with_another(tmp_path):
    assert make(tmp_path, slides=2) == 2
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.tif")}
    assert make(tmp_path) == 2
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    with (tmp_path / "labels.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert [row["slide"] for row in rows] == [f"slide_{k:04d}" for k in range(4)]
    assert {row["label"] for row in rows} == {"crowded", "sparse"}
    (tmp_path / "labels.csv").write_text("edited")
    assert make(tmp_path, slides=1) == make(tmp_path) == 0
    assert (tmp_path / "labels.csv").read_text() == "edited"
    for field, value in {"seed": 8, "size": 700, "mpp": 0.25, "task": "segment"}.items():
        with pytest.raises(ValueError, match=f"other artificial slides \\({field} "):
            make(tmp_path, **{field: value})


def test_segment_writes_masks_and_patients_and_no_labels(tmp_path):
    make(tmp_path, task="segment", slides=1, size=1000)
    mask = tifffile.imread(tmp_path / "annotations" / "slide_0000.tif")
    assert set(mask.ravel()) == {0, 1}
    assert (tmp_path / "annotations" / "classes.txt").read_text() == "0 background\n1 gland\n"
    assert (tmp_path / "labels.csv").read_text().startswith("slide,patient\n")


def test_someone_elses_file_and_a_file_in_place_of_the_folder_are_refused(tmp_path):
    (tmp_path / "slide_0001.tif").write_bytes(b"a real slide")
    with pytest.raises(ValueError, match=r"slide_0001\.tif is there already and was not made by app\.synth"):
        make(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["slide_0001.tif"]
    with pytest.raises(OSError, match="cannot be written"):
        make(tmp_path / "slide_0001.tif")


def test_a_full_disk_leaves_whole_slides_only(tmp_path, monkeypatch):
    written = itertools.count(1)

    def until_full(tile, quality):
        if next(written) > 15:  # a slide of 600 px has 9 tiles on level 0 and 4 on level 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return encode_jpeg(tile, quality)

    monkeypatch.setattr("pipelines.backends.tiff_writer.encode_jpeg", until_full)
    with pytest.raises(OSError, match="is full"):
        make(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["labels.csv", "slide_0000.tif", "synthetic.json"]
    monkeypatch.undo()
    assert make(tmp_path) == 3


def paint_scene(path, size, mask=None, workers=1):
    scene = Scene(0, 5, size, Arrangement(0.8))
    paint(scene, path, mask, mpp=0.5, description="", workers=workers)
    return scene


def test_the_number_of_threads_does_not_show_and_a_small_slide_has_one_level(tmp_path):
    for workers in (1, 3):
        paint_scene(tmp_path / f"{workers}.tif", Size(700, 600), tmp_path / f"{workers}_mask.tif", workers)
    for kind in ("", "_mask"):
        assert (tmp_path / f"1{kind}.tif").read_bytes() == (tmp_path / f"3{kind}.tif").read_bytes()
    paint_scene(tmp_path / "s.tif", Size(512, 512))
    with open_slide(tmp_path / "s.tif") as slide:
        assert [(level.width, level.height) for level in slide.levels] == [(512, 512)]


def test_slide_and_mask_hold_what_was_drawn(tmp_path):
    path, mask_path = tmp_path / "s.tif", tmp_path / "m.tif"
    pixels, drawn = paint_scene(path, Size(2600, 1300), mask_path).draw(2, 1)
    with open_slide(path) as slide:
        seen = slide.read(Region(2 * BLOCK, BLOCK, BLOCK, BLOCK, 0.5))
    assert np.abs(seen.astype(int) - pixels).mean() < 4  # JPEG
    mask = tifffile.imread(mask_path)
    assert mask.shape == (1300 // MASK_SCALE, 2600 // MASK_SCALE)
    side = BLOCK // MASK_SCALE
    part = mask[side : 2 * side, 2 * side : 3 * side].repeat(MASK_SCALE, 0).repeat(MASK_SCALE, 1)
    inside = drawn > 0
    assert (part[inside] > 0).mean() > 0.98
    assert (part[~inside] == 0).mean() > 0.98


def test_every_level_is_the_mean_of_the_one_before(tmp_path):
    size = Size(4200, 1100)
    paint_scene(tmp_path / "s.tif", size)
    sizes = [(level.width, level.height) for level in level_sizes(size, OVERVIEW)]
    assert len(sizes) == 5
    with openslide.OpenSlide(tmp_path / "s.tif") as slide:
        assert slide.level_dimensions == tuple(sizes)
        levels = [np.asarray(slide.read_region((0, 0), k, sizes[k]))[..., :3] for k in range(5)]
    for finer, coarser in itertools.pairwise(levels):
        height, width = finer.shape[0] // 2, finer.shape[1] // 2
        mean = cv2.resize(finer[: 2 * height, : 2 * width], (width, height), interpolation=cv2.INTER_AREA)
        assert np.abs(mean.astype(int) - coarser[:height, :width]).mean() < 4


TALL = """
import sys
from pathlib import Path
from pipelines.slides.geometry import Size
from pipelines.synthetic.collection import paint
from pipelines.synthetic.tissue import Arrangement, Scene
scene = Scene(0, 1, Size(2048, int(sys.argv[1])), Arrangement(0.8))
paint(scene, Path(sys.argv[2]), None, mpp=0.5, description="", workers=2)
# Not ru_maxrss: it starts from what the process that started this one held.
print(int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024)
"""


@pytest.mark.process
def test_memory_does_not_grow_with_the_height(tmp_path):
    """60 Mpx are 184 MB as pixels; drawing them may take a few MB more than drawing 2 Mpx."""
    commands = [[sys.executable, "-c", TALL, str(height), tmp_path / "s.tif"] for height in (1024, 30_000)]
    low, high = (int(subprocess.run(command, capture_output=True, check=True).stdout) for command in commands)
    assert high < 600e6
    assert high - low < 50e6


CROWDED = Arrangement(0.9)
SIDE = 12_288


def scene_of(arrangement, seed=1, side=4096):
    return Scene(0, seed, Size(side, side), arrangement)


def test_a_block_is_the_same_whenever_it_is_drawn():
    first, second = scene_of(CROWDED), scene_of(CROWDED)
    alone = first.draw(2, 1)
    for column, row in ((0, 0), (3, 3), (1, 1)):
        second.draw(column, row)
    later = second.draw(2, 1)
    assert all(map(np.array_equal, alone, later))


def test_glands_go_on_across_the_border_of_blocks():
    scene = scene_of(CROWDED)
    (left, left_mask), (right, right_mask) = scene.draw(3, 3), scene.draw(4, 3)
    seam = np.abs(left[:, -1].astype(int) - right[:, 0]).mean()
    inside = np.abs(left[:, -2].astype(int) - left[:, -1]).mean()
    assert seam < 1.5 * inside
    assert (left_mask[:, -1] == right_mask[:, 0]).mean() > 0.97


def test_the_mask_agrees_with_the_glands_drawn():
    scene = scene_of(CROWDED)
    pixels, mask = scene.draw(3, 3)
    centres = [(g.l0_x - 3 * BLOCK, g.l0_y - 3 * BLOCK) for g in scene.glands(3 * BLOCK, 3 * BLOCK, BLOCK)]
    assert all(mask[y, x] == 1 for x, y in centres if 0 <= x < BLOCK and 0 <= y < BLOCK)
    gland_px, other = pixels[mask == 1], pixels[mask == 0]
    assert gland_px.mean() < other.mean() - 10  # epithelium is darker than stroma
    ys, xs = np.nonzero(mask)
    nearest = np.min([np.hypot(xs - x, ys - y) for x, y in centres], axis=0)
    assert nearest.max() <= scene.arrangement.radii[1] + 1


def centres_of(arrangement, seed):
    return np.array([(gland.l0_x, gland.l0_y) for gland in arrangement.glands(seed, 0, 0, SIDE, SIDE)])


@pytest.mark.parametrize("arrangement", [EVEN, GROUPED, CROWDED])
def test_boxes_that_tile_the_plane_give_each_gland_once(arrangement):
    whole = arrangement.glands(3, -1000, 500, 3000, 3500)
    corners = [(x, y) for x in range(-1000, 3000, 500) for y in range(500, 3500, 1000)]
    parts = [gland for x, y in corners for gland in arrangement.glands(3, x, y, x + 500, y + 1000)]
    key = operator.attrgetter("l0_x", "l0_y", "stamp")
    assert sorted(whole, key=key) == sorted(parts, key=key)
    assert len(whole) > 20
    assert arrangement is CROWDED or len(scene_of(arrangement).glands(0, 0, 4096)) > 100


@pytest.mark.parametrize("arrangement", [EVEN, GROUPED])
@pytest.mark.parametrize("seed", range(2))
def test_no_small_window_touches_two_rows(arrangement, seed):
    """Glands that share a window are of one row: nearly on one line along the rows' direction."""
    centres = centres_of(arrangement, seed)
    dx, dy = (np.abs(centres[:, None, k] - centres[None, :, k]) for k in (0, 1))
    reach = SMALL_WINDOW + 2 * (arrangement.radii[1] + HALO)  # glands nearer than this on both axes can share one
    share = (np.maximum(dx, dy) < reach) & (dx + dy > 0)
    assert np.minimum(dx, dy)[share].max() < 40


@pytest.mark.parametrize("seed", range(3))
def test_small_windows_hold_as_many_glands_in_both_classes(seed):
    counts = []
    for arrangement in (EVEN, GROUPED):
        centres = centres_of(arrangement, seed)
        bins = np.arange(0, SIDE + 1, SMALL_WINDOW)
        grid, _, _ = np.histogram2d(centres[:, 0], centres[:, 1], bins=(bins, bins))
        counts.append(np.bincount(grid.astype(int).ravel(), minlength=6)[:6] / grid.size)
    assert np.abs(counts[0] - counts[1]).max() < 0.03


def test_wide_windows_tell_the_classes_apart():
    """576 px: even rows leave no such window empty, grouped rows leave many."""
    places = np.random.default_rng(0).integers(0, SIDE - 576, (1000, 2))
    empty = []
    for arrangement in (EVEN, GROUPED):
        centres = centres_of(arrangement, 0)
        inside = [((centres >= place) & (centres < place + 576)).all(1).any() for place in places]
        empty.append(1 - np.mean(inside))
    assert empty[0] == 0
    assert empty[1] > 0.08
