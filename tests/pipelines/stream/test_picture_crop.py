"""Whole pictures cut to tiles, beside torchvision's own transforms."""

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
from pipelines.stream.read import AREA, RATIO, PictureCrop, centre, random_box
from pipelines.stream.stream import TileStream
from tests.helpers.tiles import tile_table

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
