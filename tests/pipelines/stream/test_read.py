"""Reading: pixels land in the given array, unreadable tiles are replaced the same way everywhere, pictures are cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from pipelines.backends.image import open_image
from pipelines.catalog.catalog import SlideNames, find_slides
from pipelines.catalog.handles import SlidePool
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from pipelines.stream.batch import Labels
from pipelines.stream.read import (
    AREA,
    MAX_FAULTS,
    MAX_FAULTS_PER_SLIDE,
    RATIO,
    FaultLog,
    PictureCrop,
    Read,
    centre,
    random_box,
)
from pipelines.stream.stream import TileStream
from pipelines.tiles.index import TileTable
from tests.helpers.tiles import TILE, MemorySpec, memory_specs, tile_table


def reader(table: TileTable, bad: dict[str, set[int]], lost: set[str]) -> tuple[Read, SlidePool]:
    def damage(spec: MemorySpec) -> MemorySpec:
        return replace(spec, bad=frozenset(bad.get(spec.slide_id, ())), opens=spec.slide_id not in lost)

    pool = SlidePool(memory_specs(table, damage), 2)
    return Read(table, pool, None), pool


def fill(read: Read, row: int, log: FaultLog | None = None) -> tuple[int, int, int, int]:
    """Row used, slide and tile that the pixels tell, and the target."""
    image, target = np.zeros((TILE, TILE, 3), np.uint8), np.zeros((), np.int64)
    used = read.fill(0, row, Labels(np.arange(len(read.tiles)) * 10), image, target, log or FaultLog(None))
    assert (image[..., 0] == image[0, 0, 0]).all()
    assert (image[..., 1] == image[0, 0, 1]).all()
    return used, int(image[0, 0, 0]), int(image[0, 0, 1]), int(target)


def test_a_whole_tile_is_read_as_it_is() -> None:
    read, _ = reader(tile_table([3, 4]), {}, set())
    assert fill(read, 5) == (5, 1, 2, 50)


def test_a_bad_tile_is_replaced_by_the_next_of_its_slide_and_the_target_follows() -> None:
    read, _ = reader(tile_table([3, 4]), {"s0": {1}, "s1": {2, 3}}, set())
    assert fill(read, 1) == (2, 0, 2, 20)
    assert fill(read, 5) == (3, 1, 0, 30)  # around the end of the slide


def test_a_lost_slide_is_replaced_by_the_next_slide_at_once() -> None:
    told: list[tuple[str, Region | None]] = []
    read, _ = reader(tile_table([3, 4, 2]), {}, {"s1", "s2"})
    log = FaultLog(lambda slide_id, region, error: told.append((slide_id, region)))
    assert fill(read, 4, log) == (0, 0, 0, 0)
    assert told == [("s1", None), ("s2", None)]


def test_after_some_bad_tiles_the_next_slide_is_tried() -> None:
    read, _ = reader(tile_table([50, 2]), {"s0": set(range(50))}, set())
    told: list[Region | None] = []
    assert fill(read, 7, FaultLog(lambda slide_id, region, error: told.append(region)))[0] == 50
    assert len(told) == MAX_FAULTS_PER_SLIDE


def test_each_fault_is_told_once() -> None:
    table = tile_table([3])
    told: list[tuple[str, Region | None, str]] = []
    read, _ = reader(table, {"s0": {1}}, set())
    log = FaultLog(lambda slide_id, region, error: told.append((slide_id, region, str(error))))
    for _ in range(3):
        fill(read, 1, log)
    assert told == [("s0", table.region(1), "s0: bad tile at 8")]


def test_a_failed_handle_is_opened_anew() -> None:
    table = tile_table([3])
    specs = memory_specs(table, lambda spec: replace(spec, bad=frozenset({1})))
    read = Read(table, SlidePool(specs, 2), None)
    fill(read, 1)
    assert specs[0].opened == ["s0", "s0"]


def test_a_table_without_readable_tiles_is_an_error_that_names_them() -> None:
    read, _ = reader(tile_table([2, 1]), {"s0": {0, 1}}, {"s1"})
    with pytest.raises(SlideError, match=r"in place of row 0 .*3 tried(.|\n)*s0: bad tile at 8(.|\n)*s1 does not open"):
        fill(read, 0)


def test_replacements_are_bounded() -> None:
    table = tile_table([1] * (MAX_FAULTS + 5))
    read, _ = reader(table, {}, {f"s{k}" for k in range(MAX_FAULTS)})
    with pytest.raises(SlideError, match=f"{MAX_FAULTS} tried"):
        fill(read, 0)
    assert fill(read, 1)[0] == MAX_FAULTS


def test_rows_of_a_slide_need_not_be_together_in_the_table() -> None:
    table = tile_table([3, 3]).select(np.array([0, 3, 1, 4, 2, 5]))
    read, _ = reader(table, {"s1": {1}}, set())
    assert fill(read, 3)[:3] == (5, 1, 2)


def test_other_errors_are_not_taken_for_damage() -> None:
    table = tile_table([2])
    finer = TileTable(table.slides, table.slide, table.l0_x, table.l0_y, table.tissue, replace(table.settings, mpp=0.1))
    read, _ = reader(finer, {}, set())
    with pytest.raises(ValueError, match=r"mpp 0\.1 cannot be had"):
        fill(read, 0)


SIZES = [(500, 375), (375, 500), (150, 150), (61, 333), (1000, 90), (256, 256), (225, 224)]


def picture(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("side", [224, 64])
def test_validation_is_torchvisions_resize_and_centre_crop(width: int, height: int, side: int) -> None:
    pixels = picture(width, height)
    shorter = {224: 256, 64: 73}[side]
    expected = functional.center_crop(functional.resize(Image.fromarray(pixels), [shorter]), [side, side])
    out = np.empty((side, side, 3), np.uint8)
    PictureCrop(side, 0, varied=False).fill(7, pixels, out)
    assert np.array_equal(out, np.asarray(expected))
    assert np.array_equal(centre(pixels, side), out)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_training_is_torchvisions_crop_of_the_box_that_was_drawn(
    width: int, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels, boxes = picture(width, height), []

    def told(*size: object) -> tuple[int, int, int, int]:
        boxes.append(random_box(*size))  # type: ignore[arg-type]
        return boxes[-1]

    monkeypatch.setattr("pipelines.stream.read.random_box", told)
    out = np.empty((32, 32, 3), np.uint8)
    flips = 0
    for sample in range(40):
        PictureCrop(32, 3, varied=True).fill(sample, pixels, out)
        left, top, box_width, box_height = boxes[-1]
        cut = functional.resized_crop(Image.fromarray(pixels), top, left, box_height, box_width, [32, 32])
        flipped = np.array_equal(out, np.asarray(functional.horizontal_flip(cut)))
        assert flipped or np.array_equal(out, np.asarray(cut))
        flips += flipped
        again = np.empty_like(out)
        PictureCrop(32, 3, varied=True).fill(sample, pixels, again)
        assert np.array_equal(out, again)
    assert 8 < flips < 32
    assert len(set(boxes)) > 5
    PictureCrop(32, 3, varied=True, flip=False).fill(0, pixels, out)
    left, top, box_width, box_height = boxes[-1]
    cut = functional.resized_crop(Image.fromarray(pixels), top, left, box_height, box_width, [32, 32])
    assert np.array_equal(out, np.asarray(cut))


def test_boxes_are_spread_as_torchvisions() -> None:
    """Means of area, ratio and corner over many draws; the fallback is the same box."""
    torch.manual_seed(0)
    image = torch.empty(3, 375, 500)
    theirs = np.array([v2.RandomResizedCrop(224).make_params([image]) for _ in range(2000)], dtype=object)
    theirs = np.array([[p["left"], p["top"], p["width"], p["height"]] for p in theirs], float)
    ours = np.array([random_box(500, 375, np.random.default_rng(k)) for k in range(2000)], float)
    assert ours.mean(0) == pytest.approx(theirs.mean(0), rel=0.06)
    assert ours.std(0) == pytest.approx(theirs.std(0), rel=0.08)
    part, ratio = ours[:, 2] * ours[:, 3] / (500 * 375), ours[:, 2] / ours[:, 3]
    assert AREA[0] * 0.98 <= part.min() < part.max() <= AREA[1]
    assert RATIO[0] * 0.98 <= ratio.min() < ratio.max() <= RATIO[1] * 1.02
    for width, height in ((10_000, 2), (2, 10_000)):
        fallback = v2.RandomResizedCrop(224, scale=(0.9, 1)).make_params([torch.empty(3, height, width)])
        expected = tuple(fallback[name] for name in ("left", "top", "width", "height"))
        assert random_box(width, height, np.random.default_rng(1))[2:] == expected[2:]


def test_shards_and_threads_give_the_same_pictures(tmp_path: Path) -> None:
    """Each is named by its path: a.png is there twice."""
    for k, (width, height) in enumerate(SIZES[:4]):
        (tmp_path / f"class{k % 2}").mkdir(exist_ok=True)
        Image.fromarray(picture(width, height)).save(tmp_path / f"class{k % 2}" / f"{'ab'[k // 2]}.png")
    specs = find_slides(tmp_path, whole_pictures=True)
    ids = [spec.slide_id for spec in specs]
    assert ids == ["class0/a", "class0/b", "class1/a", "class1/b"]
    names = SlideNames(ids)
    assert [names.match(name) for name in ("class1/a.png", "class1/a", "a.png")] == ["class1/a", "class1/a", None]
    table = replace(tile_table([1] * 4, tile=32), slides=tuple(ids))
    stream = TileStream.over(table, seed=3, epochs=2).read(SlidePool(specs, 2)).crop(varied=True).batch(4)

    def images(shards: list[range], threads: int) -> np.ndarray:
        parts = []
        for rows in shards:
            with iter(stream.shard(rows).prefetch(threads=threads)) as batches:
                parts.append([batch.images.copy() for batch in batches])
        return np.stack([np.concatenate(shares) for shares in zip(*parts, strict=True)])

    whole = images([range(4)], 1)
    assert np.array_equal(whole, images([range(2), range(2, 4)], 3))
    assert not np.array_equal(whole[0], whole[1]), "the second epoch is cut otherwise"
    expected = np.empty((32, 32, 3), np.uint8)
    with open_image(specs[1].path, mpp=0.5) as slide:
        level = slide.levels[0]
        PictureCrop(32, 3, varied=True).fill(1, slide.read(Region(0, 0, level.width, level.height, 0.5)), expected)
    assert np.array_equal(whole[0, 1], expected)
    with iter(stream.crop(varied=False)) as batches:
        assert np.array_equal(next(batches).images[2], centre(picture(*SIZES[1]), 32))
