"""Tiles that differ in size: read, replaced, left out, resumed and brought to the device one at a time."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipelines.catalog.handles import SlidePool
from pipelines.slides.slide import PADDING
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.batch import Batch, shaped
from pipelines.stream.device import DevicePrefetcher
from pipelines.stream.device_pixels import PixelMaker
from pipelines.stream.read import UNREAD
from pipelines.stream.stream import TileStream
from pipelines.tiles.index import TileTable
from tests.helpers.tiles import MemorySpec, memory_specs, tile_table

COUNTS = [2, 4, 1, 3]
SIDES = np.array([[16, 8], [32, 16], [8, 24], [24, 8]], np.int32)
"""Width and height of each slide's only tile, some larger than the slide."""


def table() -> TileTable:
    whole = tile_table([1] * len(COUNTS))
    return replace(whole, settings=replace(whole.settings, tile="slide"), sides=SIDES)


def specs(damaged: tuple[str, ...] = ()) -> tuple[MemorySpec, ...]:
    def changed(spec: MemorySpec) -> MemorySpec:
        return replace(spec, bad=frozenset({0})) if spec.slide_id in damaged else spec

    return memory_specs(tile_table(COUNTS), changed)


def stream(damaged: tuple[str, ...] = (), *, replaces: bool = True) -> TileStream:
    return (
        TileStream.over(table(), epochs=1)
        .read(SlidePool(specs(damaged), 4), replaces=replaces)
        .label(np.arange(len(COUNTS)))
        .batch(2)
    )


def pixels(batch: Batch, k: int) -> NDArray[np.uint8]:
    return shaped(batch.image(k), (*batch.sides(k), 3)).copy()


def test_each_tile_has_its_own_size_and_is_white_outside_its_slide() -> None:
    with iter(stream()) as batches:
        for batch in batches:
            for k, row in enumerate(batch.rows.tolist()):
                image = pixels(batch, k)
                width, height = SIDES[row].tolist()
                assert image.shape == (height, width, 3)
                own = min(width, 8 * COUNTS[row])
                assert (image[:8, :own, 0] == row).all()
                assert (image[8:] == PADDING).all()
                assert (image[:, own:] == PADDING).all()
            batch.release()


def test_a_slide_that_cannot_be_read_is_replaced_by_the_next_with_its_size() -> None:
    with iter(stream(("s1",))) as batches:
        rows, sides = [], []
        for batch in batches:
            rows += batch.rows.tolist()
            sides += [batch.sides(k) for k in range(len(batch))]
            assert batch.replaced == int(1 in batch.wanted)
            batch.release()
    assert rows == [0, 2, 2, 3]
    assert sides == [tuple(SIDES[row, ::-1].tolist()) for row in rows]


def test_a_slide_that_is_left_out_is_blank_and_of_its_own_size() -> None:
    with iter(stream(("s1",), replaces=False)) as batches:
        batch = next(batches)
        assert batch.rows.tolist() == [0, UNREAD]
        assert pixels(batch, 1).shape == (16, 32, 3)
        assert not pixels(batch, 1).any()
        batch.release()


def test_resume_is_exact_and_other_sizes_are_another_stream() -> None:
    def rest(batches: object) -> list[list[bytes]]:
        taken = []
        for batch in batches:  # type: ignore[attr-defined]
            taken.append([pixels(batch, k).tobytes() for k in range(len(batch))])
            batch.release()
        return taken

    shuffled = stream().shuffle(2)
    everything = rest(iter(shuffled))
    with iter(shuffled) as first:
        next(first).release()
        state = json.loads(json.dumps(first.get_state()))
    second = iter(shuffled)
    second.set_state(state)
    assert rest(second) == everything[1:]
    other = replace(shuffled, tiles=replace(table(), sides=SIDES + np.int32(8)))
    with pytest.raises(ValueError, match="tiles was"):
        iter(other).set_state(state)


def test_microbatches_are_single_slides_turned_by_halves() -> None:
    made: dict[int, torch.Tensor] = {}
    plain: dict[int, torch.Tensor] = {}
    for augment, into in (("none", plain), ("device", made)):
        settings = AugmentSettings(augment=augment, stain_jitter=0, brightness=0)  # type: ignore[arg-type]
        maker = PixelMaker(torch.device("cpu"), settings, 5, channels_last=False)
        with iter(stream()) as batches, DevicePrefetcher(batches, batches.ready, maker) as feed:
            for batch in feed:
                for k, (images, targets) in enumerate(feed.microbatches(batch, [1] * len(batch))):
                    assert images is not None
                    assert targets is not None
                    into[int(batch.rows[k])] = images
                    assert targets.tolist() == [batch.rows[k]]
                batch.release()
    for row, image in plain.items():
        assert image.shape == (1, 3, *SIDES[row, ::-1].tolist())
        turned = [image, image.flip(3), image.flip(2), image.flip(2, 3)]
        assert any(torch.equal(made[row], each) for each in turned)
    assert any(not torch.equal(made[row], plain[row]) for row in plain)
