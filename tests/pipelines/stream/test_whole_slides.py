"""Tiles that differ in size: read, replaced, left out, resumed and brought to the device one at a time."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipelines.catalog.handles import SlidePool
from pipelines.slides.slide import PADDING
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.batch import shaped
from pipelines.stream.device import DevicePrefetcher
from pipelines.stream.device_pixels import PixelMaker
from pipelines.stream.read import UNREAD
from pipelines.stream.stream import TileStream
from tests.helpers.tiles import memory_specs, tile_table

COUNTS = [2, 4, 1, 3]
SIDES = np.array([[16, 8], [32, 16], [8, 24], [24, 8]], np.int32)
"""Width and height of each slide's only tile, some larger than the slide."""


def table():
    whole = tile_table([1] * len(COUNTS))
    return replace(whole, settings=replace(whole.settings, tile="slide"), sides=SIDES)


def stream(damaged=(), *, replaces=True):
    bad = {slide: frozenset({0}) for slide in damaged}
    specs = memory_specs(tile_table(COUNTS), lambda spec: replace(spec, bad=bad.get(spec.slide_id, frozenset())))
    reading = TileStream.over(table(), epochs=1).read(SlidePool(specs, 4), replaces=replaces)
    return reading.label(np.arange(len(COUNTS))).batch(2)


def all_of(stream):
    with iter(stream) as batches:
        for batch in batches:
            yield batch
            batch.release()


def pixels(batch, k):
    return shaped(batch.image(k), (*batch.sides(k), 3)).copy()


def test_each_tile_has_its_own_size_and_is_white_outside_its_slide():
    for batch in all_of(stream()):
        for k, row in enumerate(batch.rows.tolist()):
            image, (width, height) = pixels(batch, k), SIDES[row].tolist()
            assert image.shape == (height, width, 3)
            own = min(width, 8 * COUNTS[row])
            assert (image[:8, :own, 0] == row).all()
            assert (image[8:] == PADDING).all()
            assert (image[:, own:] == PADDING).all()


def test_a_slide_that_cannot_be_read_is_replaced_by_the_next_or_blank_of_its_own_size():
    rows, sides = [], []
    for batch in all_of(stream(("s1",))):
        rows += batch.rows.tolist()
        sides += [batch.sides(k) for k in range(len(batch))]
        assert batch.replaced == int(1 in batch.wanted)
    assert rows == [0, 2, 2, 3]
    assert sides == [tuple(SIDES[row, ::-1].tolist()) for row in rows]
    batch = next(all_of(stream(("s1",), replaces=False)))
    assert batch.rows.tolist() == [0, UNREAD]
    assert pixels(batch, 1).shape == (16, 32, 3)
    assert not pixels(batch, 1).any()


def test_resume_is_exact_and_other_sizes_are_another_stream():
    def rest(batches):
        return [[pixels(batch, k).tobytes() for k in range(len(batch))] for batch in batches]

    shuffled = stream().shuffle(2)
    everything = rest(all_of(shuffled))
    with iter(shuffled) as first:
        next(first).release()
        state = json.loads(json.dumps(first.get_state()))
    with iter(shuffled) as second:
        second.set_state(state)
        assert rest(second) == everything[1:]
    other = replace(shuffled, tiles=replace(table(), sides=SIDES + np.int32(8)))
    with pytest.raises(ValueError, match="tiles was"):
        iter(other).set_state(state)


def test_microbatches_are_single_slides_turned_by_halves():
    def made(augment):
        images_of = {}
        settings = AugmentSettings(augment=augment, stain_jitter=0, brightness=0)
        maker = PixelMaker(torch.device("cpu"), settings, 5, channels_last=False)
        with iter(stream()) as batches, DevicePrefetcher(batches, batches.ready, maker) as feed:
            for batch in feed:
                for k, (images, targets) in enumerate(feed.microbatches(batch, [1] * len(batch))):
                    images_of[int(batch.rows[k])] = images
                    assert targets.tolist() == [batch.rows[k]]
                batch.release()
        return images_of

    plain, turned = made("none"), made("device")
    for row, image in plain.items():
        assert image.shape == (1, 3, *SIDES[row, ::-1].tolist())
        assert any(torch.equal(turned[row], each) for each in (image, image.flip(3), image.flip(2), image.flip(2, 3)))
    assert any(not torch.equal(turned[row], plain[row]) for row in plain)
