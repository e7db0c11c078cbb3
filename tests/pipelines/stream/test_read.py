"""Reading: pixels land in the given array, unreadable tiles are replaced the same way everywhere, pictures are cut."""

from dataclasses import replace

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
    PictureCrop,
    SampleReader,
    centre,
    random_box,
)
from pipelines.stream.stream import TileStream
from tests.helpers.tiles import TILE, memory_specs, tile_table


def specs_of(table, bad, lost):
    def damage(spec):
        return replace(spec, bad=frozenset(bad.get(spec.slide_id, ())), opens=spec.slide_id not in lost)

    return memory_specs(table, damage)


def ignore(slide_id, region, error):
    pass


def fill(table, row, bad=(), lost=(), log=ignore):
    """Row used, slide and tile that the pixels tell, and the target; of tiles ``bad`` by slide and slides ``lost``."""
    pool, labels = SlidePool(specs_of(table, dict(bad), lost), 2), Labels(np.arange(len(table)) * 10)
    read = SampleReader(table, pool, labels, log)
    image, target = np.zeros((TILE, TILE, 3), np.uint8), np.zeros((), np.int64)
    used = read.fill(0, row, image, target)
    assert (image[..., :2] == image[0, 0, :2]).all()
    return used, int(image[0, 0, 0]), int(image[0, 0, 1]), int(target)


@pytest.mark.parametrize(
    ("counts", "row", "bad", "lost", "expected"),
    [
        ([3, 4], 5, {}, "", (5, 1, 2, 50)),
        ([3, 4], 1, {"s0": {1}}, "", (2, 0, 2, 20)),  # the next of the slide, and the target follows
        ([3, 4], 5, {"s1": {2, 3}}, "", (3, 1, 0, 30)),  # around the end of the slide
        ([3, 4, 2], 4, {}, "s1 s2", (0, 0, 0, 0)),  # the next slide at once
        ([50, 2], 7, {"s0": range(50)}, "", (50, 1, 0, 500)),  # after some bad tiles
    ],
)
def test_what_cannot_be_read_is_replaced_and_reported(counts, row, bad, lost, expected):
    table, told = tile_table(counts), []
    assert fill(table, row, bad, lost.split(), lambda *fault: told.append(fault)) == expected
    if lost:
        assert [fault[:2] for fault in told] == [("s1", None), ("s2", None)]
    elif counts == [50, 2]:
        assert len(told) == MAX_FAULTS_PER_SLIDE
    elif bad == {"s0": {1}}:
        assert [(*place, str(error)) for *place, error in told] == [("s0", table.region(1), "s0: bad tile at 8")]


def test_a_failed_handle_is_opened_anew_and_rows_of_a_slide_need_not_be_together():
    table = tile_table([3])
    specs = specs_of(table, {"s0": {1}}, ())
    image, target = np.zeros((TILE, TILE, 3), np.uint8), np.zeros((), np.int64)
    SampleReader(table, SlidePool(specs, 2), Labels(np.arange(3)), ignore).fill(0, 1, image, target)
    assert specs[0].opened == ["s0", "s0"]
    apart = tile_table([3, 3]).select(np.array([0, 3, 1, 4, 2, 5]))
    assert fill(apart, 3, {"s1": {1}})[:3] == (5, 1, 2)


def test_replacements_are_bounded_and_other_errors_are_not_taken_for_damage():
    with pytest.raises(SlideError, match=r"in place of row 0 .*3 tried(.|\n)*s0: bad tile at 8(.|\n)*s1 does not open"):
        fill(tile_table([2, 1]), 0, {"s0": {0, 1}}, ["s1"])
    table, lost = tile_table([1] * (MAX_FAULTS + 5)), [f"s{k}" for k in range(MAX_FAULTS)]
    with pytest.raises(SlideError, match=f"{MAX_FAULTS} tried"):
        fill(table, 0, lost=lost)
    assert fill(table, 1, lost=lost)[0] == MAX_FAULTS
    table = tile_table([2])
    with pytest.raises(ValueError, match=r"mpp 0\.1 cannot be had"):
        fill(replace(table, settings=replace(table.settings, mpp=0.1)), 0)


SIZES = [(500, 375), (375, 500), (150, 150), (61, 333), (1000, 90), (256, 256), (225, 224)]


def picture(width, height):
    return np.random.default_rng(width).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("side", [224, 64])
def test_validation_is_torchvisions_resize_and_centre_crop(width, height, side):
    pixels = picture(width, height)
    shorter = {224: 256, 64: 73}[side]
    expected = functional.center_crop(functional.resize(Image.fromarray(pixels), [shorter]), [side, side])
    out = np.empty((side, side, 3), np.uint8)
    PictureCrop(side, 0, varied=False).fill(7, pixels, out)
    assert np.array_equal(out, np.asarray(expected))
    assert np.array_equal(centre(pixels, side), out)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_training_is_torchvisions_crop_of_the_box_that_was_drawn(width, height, monkeypatch):
    pixels, boxes, flips = picture(width, height), [], 0
    monkeypatch.setattr(
        "pipelines.stream.read.random_box", lambda *size: (boxes.append(random_box(*size)), boxes[-1])[1]
    )

    def ours_and_theirs(sample, **options):
        out = np.empty((32, 32, 3), np.uint8)
        PictureCrop(32, 3, varied=True, **options).fill(sample, pixels, out)
        left, top, box_width, box_height = boxes[-1]
        return out, functional.resized_crop(Image.fromarray(pixels), top, left, box_height, box_width, [32, 32])

    for sample in range(40):
        out, cut = ours_and_theirs(sample)
        flipped = np.array_equal(out, np.asarray(functional.horizontal_flip(cut)))
        assert flipped or np.array_equal(out, np.asarray(cut))
        flips += flipped
        assert np.array_equal(out, ours_and_theirs(sample)[0])
    assert 8 < flips < 32
    assert len(set(boxes)) > 5
    assert np.array_equal(*ours_and_theirs(0, flip=False))


def test_boxes_are_spread_as_torchvisions():
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


def test_shards_and_threads_give_the_same_pictures(tmp_path):
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

    def images(shards, threads):
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
