"""Boxes of tiles that stay bytes, beside crops of what is made of whole tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from parallel.offload.live_bytes import LiveBytes
from pipelines.stream.augment import AugmentSettings, StainSteps, draw
from pipelines.stream.batch import Batch
from pipelines.stream.device import DevicePrefetcher
from pipelines.stream.device_batch import BoxMaker, MaskBoxes, TileBoxes
from pipelines.stream.device_pixels import PixelMaker
from pipelines.tiles.stain_fit import PUBLISHED, Method, StainFit

CPU = torch.device("cpu")
COUNT = 32
STAINED = {
    "macenko": StainFit("macenko", (0.662, 0.648, 0.377, 0.176, 0.851, 0.495, 2.844, 1.741)),
    "reinhard": StainFit("reinhard", (-1.479, -0.145, 0.06, 0.73, 0.126, 0.033)),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("side", [(61, 61), (45, 83)])
@pytest.mark.parametrize(
    ("augment", "method"),
    [
        ("device", None),
        ("none", None),
        ("cpu", None),
        ("device", "macenko"),
        ("device", "reinhard"),
        ("none", "reinhard"),
    ],
)
def test_boxes_are_crops_of_the_whole_bit_for_bit(
    augment: str, method: Method | None, side: tuple[int, int], channels_last: bool
) -> None:
    settings = AugmentSettings(augment=augment)  # type: ignore[arg-type]
    numbers = np.random.default_rng(side[0])
    images = torch.from_numpy(numbers.integers(0, 256, (COUNT, *side, 3)).astype(np.uint8))
    masks = images[..., 1] // 64
    samples = np.arange(7, 7 + COUNT)
    drawn = draw(settings, 5, samples)
    assert len({*zip(drawn.quarter_turns.tolist(), drawn.flip.tolist(), strict=True)}) == (
        1 if augment == "none" else 8
    )
    rows = samples % 3
    stains = method and StainSteps.of(PUBLISHED[method], [None, STAINED[method]], [0, 1, 1])
    pixels = PixelMaker(CPU, settings, 5, channels_last=channels_last, stains=stains or None)
    whole, whole_masks = pixels.make(images, masks, samples, rows)
    boxes, mask_boxes = BoxMaker(pixels).make(images, masks, samples, rows)
    assert whole is not None
    assert whole_masks is not None
    assert boxes is not None
    assert isinstance(mask_boxes, MaskBoxes)
    assert boxes.shape == tuple(whole.shape)
    for _ in range(20):
        top, left = (int(numbers.integers(0, length)) for length in side)
        bottom, right = (int(numbers.integers(a + 1, length + 1)) for a, length in zip((top, left), side, strict=True))
        box = boxes.box(range(top, bottom), range(left, right))
        assert torch.equal(box, whole[:, :, top:bottom, left:right])
        assert torch.equal(
            mask_boxes.box(range(top, bottom), range(left, right)), whole_masks[:, top:bottom, left:right]
        )
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert box.is_contiguous(memory_format=layout)


def test_oblong_tiles_are_turned_by_halves_alone() -> None:
    """Each of the four ways as often as the others: none are lost to turns that do not fit."""
    image = torch.arange(6, dtype=torch.uint8).reshape(1, 2, 3, 1).expand(COUNT, 2, 3, 3)
    pixels = PixelMaker(CPU, AugmentSettings(stain_jitter=0, brightness=0), 1)
    _, turned = pixels.make(None, image[..., 0], np.arange(COUNT))
    assert turned is not None
    corners = [int(tile[0, 0]) for tile in turned]
    assert [corners.count(k) > 3 for k in range(6)] == [True, False, True, True, False, True]


def test_a_feed_of_boxes_makes_nothing_and_copies_nothing() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3)).astype(np.uint8)
    every, samples = np.ones(3, bool), np.arange(3)
    batch = Batch(images, np.arange(3), samples, samples, 0, lambda: None, every, every, samples)
    pixels = PixelMaker(CPU, AugmentSettings(), 0)
    with LiveBytes() as live, DevicePrefetcher(iter([batch]), lambda: False, BoxMaker(pixels), prefetch=2) as feed:
        parts = list(feed.microbatches(next(feed), [2, 1]))
        assert not [*feed.held()]
    assert live.peak_bytes == 3 * 8, "labels alone are on the device"
    (first, labels), (second, _) = parts
    assert isinstance(first, TileBoxes)
    assert isinstance(second, TileBoxes)
    assert isinstance(labels, torch.Tensor)
    assert labels.tolist() == [0, 1]
    expected, _ = pixels.make(torch.from_numpy(images), None, samples)
    assert expected is not None
    images[2] = 0  # boxes are of the buffer, until the batch is released
    assert torch.equal(first.box(range(3, 9), range(16)), expected[:2, :, 3:9])
    assert second.box(range(16), range(16)).unique().numel() == 3
