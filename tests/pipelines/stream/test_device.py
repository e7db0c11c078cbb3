"""The device feed on the CPU: values, orientation, and independence of how a batch is cut."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.stream.augment import AugmentSettings, apply_jitter, draw
from pipelines.stream.batch import Batch
from pipelines.stream.device import DevicePrefetcher, allocate_pinned
from pipelines.stream.device_batch import CopyStreams, DeviceBatch, feed_stream
from pipelines.stream.device_pixels import IMAGENET, PixelMaker
from pipelines.stream.stream import TileStream
from tests.helpers.tiles import pool_of, tile_table

CPU = torch.device("cpu")
NONE = AugmentSettings(augment="none")


def batch_of(n: int, size: int = 16, first: int = 100, *, masks: bool = False) -> Batch:
    images = np.random.default_rng(0).integers(0, 256, (n, size, size, 3)).astype(np.uint8)
    targets = images[..., 0] // 64 if masks else np.arange(n)
    samples = np.arange(first, first + n)
    every = np.ones(n, bool)
    return Batch(images, targets, samples, samples, first, lambda: None, every, every, samples)


def feed_of(
    settings: AugmentSettings, seed: int, left: list[Batch] | None = None, *, prefetch: int = 0, beside: Any = None
) -> DevicePrefetcher:
    """On the CPU, of batches that are there at once; ``left`` loses those that were taken."""
    left = [] if left is None else left
    source = iter(lambda: left.pop(0), None)
    pixels = PixelMaker(CPU, settings, seed)
    return DevicePrefetcher(
        source, lambda: bool(left), pixels, prefetch=prefetch, beside=beside or contextlib.nullcontext
    )


def made(feed: DevicePrefetcher, batch: Batch, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    images: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    for image, target in feed.microbatches(batch, sizes):
        assert image is not None
        assert target is not None
        images.append(image)
        targets.append(target)
    assert [len(i) for i in images] == sizes
    return torch.cat(images), torch.cat(targets)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("normalisation", [IMAGENET, ((0.5, 0.5, 0.5), (0.2, 0.3, 0.4))])
def test_pixels_are_normalised(normalisation: tuple[tuple[float, ...], tuple[float, ...]], channels_last: bool) -> None:
    batch = batch_of(3)
    pixels = PixelMaker(CPU, NONE, 0, normalisation, channels_last)
    feed = DevicePrefetcher(iter(()), lambda: False, pixels)
    images, targets = next(feed.microbatches(batch, [3]))
    assert images is not None
    assert targets is not None
    mean, std = (np.array(v) for v in normalisation)
    expected = ((batch.images / 255 - mean) / std).transpose(0, 3, 1, 2)
    assert images.dtype == torch.float32
    assert np.abs(images.numpy() - expected).max() < 1e-5
    assert images.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert targets.tolist() == [0, 1, 2]


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [3, 4]])
def test_the_cut_into_microbatches_changes_no_bit(sizes: list[int]) -> None:
    feed = feed_of(AugmentSettings(), 4)
    whole = made(feed, batch_of(7, masks=True), [2, 2, 3])
    parts = made(feed, batch_of(7, masks=True), sizes)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])


def test_ranks_draw_what_one_process_draws() -> None:
    feed = feed_of(AugmentSettings(), 4)
    batch = batch_of(6)
    whole = made(feed, batch, [6])[0]
    half = Batch(
        batch.images[3:],
        batch.targets[3:],
        batch.rows[3:],
        batch.samples[3:],
        batch.first_sample,
        lambda: None,
        batch.has_image[3:],
        batch.has_target[3:],
        batch.wanted[3:],
    )
    assert torch.equal(whole[3:], made(feed, half, [3])[0])


def test_tile_and_mask_turn_together() -> None:
    feed = feed_of(AugmentSettings(stain_jitter=0, brightness=0), 2)
    batch = batch_of(16, masks=True)
    images, masks = made(feed, batch, [16])
    mean, std = IMAGENET
    red = torch.round((images[:, 0] * std[0] + mean[0]) * 255)
    assert torch.equal(red // 64, masks.float())
    assert masks.dtype == torch.uint8
    changed = [not np.array_equal(masks[k].numpy(), batch.targets[k]) for k in range(16)]
    assert sum(changed) > 8
    assert torch.equal(masks.flatten(1).long().sum(1), torch.from_numpy(batch.targets.astype(int).sum((1, 2))))


def test_a_part_of_a_batch_is_made_as_in_the_whole() -> None:
    batch = batch_of(6, masks=True)
    images, masks = made(feed_of(AugmentSettings(), 2), batch, [6])
    some = np.arange(6) < 2
    half = replace(batch, images=batch.images[:2], targets=batch.targets[2:], has_image=some, has_target=~some)
    first, second, third = feed_of(AugmentSettings(), 2).microbatches(half, [2, 1, 3])
    assert first[0] is not None
    assert torch.equal(first[0], images[:2])
    assert (first[1], second[0], third[0]) == (None, None, None)
    assert second[1] is not None
    assert third[1] is not None
    assert torch.equal(torch.cat([second[1], third[1]]), masks[2:])


def test_stains_change_as_the_numpy_version_changes_them() -> None:
    settings = AugmentSettings(flip=False, stain_jitter=0.1, brightness=0.2)
    batch = batch_of(4)
    images, _ = made(feed_of(settings, 9), batch, [4])
    drawn = draw(settings, 9, batch.samples)
    assert drawn.matrix is not None
    assert drawn.shift is not None
    mean, std = (np.array(v)[:, None, None] for v in IMAGENET)
    for k in range(4):
        expected = batch.images[k].copy()
        apply_jitter(expected, drawn.matrix[k], drawn.shift[k])
        found = (images[k].numpy() * std + mean) * 255
        assert np.abs(found - expected.transpose(2, 0, 1)).max() <= 0.51  # that one rounds to uint8
        assert (expected != batch.images[k]).mean() > 0.5


def test_the_batch_is_left_as_it_is_and_targets_outlive_it() -> None:
    batch = batch_of(4, masks=True)
    before = batch.images.copy()
    _, targets = made(feed_of(NONE, 0), batch, [4])
    assert (batch.images == before).all()
    kept = targets.clone()
    batch.targets[...] = 77
    assert torch.equal(targets, kept)


def test_sizes_must_make_up_the_batch() -> None:
    with pytest.raises(ValueError, match=r"\[2, 1\] tiles do not make up a batch of 4"):
        next(feed_of(NONE, 0).microbatches(batch_of(4), [2, 1]))


def test_the_feed_gives_the_batches_of_its_source_and_takes_the_next_one_early() -> None:
    table = tile_table([9])
    stream = TileStream.over(table, epochs=1).read(pool_of(table)).batch(2)
    plain = [b.rows.tolist() for b in iter(stream)]
    given, early = [], False
    with (
        iter(stream) as tiles,
        DevicePrefetcher(tiles, tiles.ready, PixelMaker(CPU, AugmentSettings(), 0)) as feed,
    ):
        for batch in feed:
            given.append(batch.rows.tolist())
            for _ in feed.microbatches(batch, [1] * len(batch)):
                time.sleep(0.01)  # as computing does: the next batch is read, and sent between two microbatches
            batch.release()
            early = early or tiles.get_state()["batch"] > len(given)
    assert given == plain
    assert early


def test_what_was_taken_early_is_released_when_the_feed_is_closed() -> None:
    released: list[int] = []
    batches = [replace(batch_of(2, first=k), release=lambda k=k: released.append(k)) for k in range(3)]
    with feed_of(NONE, 0, batches, prefetch=1) as feed:
        made(feed, next(feed), [1, 1])
    assert released == [1]
    assert len(batches) == 1


def test_the_feed_says_whether_the_next_batch_is_there_as_it_was_wanted() -> None:
    whole, other = batch_of(2), replace(batch_of(2), rows=np.array([100, 7]))
    batches = [whole, other]
    feed = feed_of(NONE, 0, batches)
    assert feed.next_as_wanted()
    assert feed.next_as_wanted()
    assert next(feed) is whole
    assert not feed.next_as_wanted()
    assert next(feed) is other
    assert not feed.next_as_wanted()


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("prefetch", [1, 3, 9])
def test_microbatches_made_ahead_are_the_same_to_the_last_bit(prefetch: int, masks: bool) -> None:
    batches = [batch_of(5, 24, 100 * k, masks=masks) for k in range(3)]
    left = list(batches)
    plain, ahead = feed_of(AugmentSettings(), 4), feed_of(AugmentSettings(), 4, left, prefetch=prefetch)
    for batch in batches:
        assert next(ahead) is batch
        found = list(ahead.microbatches(batch, [2, 2, 1]))
        for one, other in zip(plain.microbatches(batch, [2, 2, 1]), found, strict=True):
            assert one[0] is not None
            assert other[0] is not None
            assert torch.equal(one[0], other[0])
            assert other[0].stride() == one[0].stride()
            assert torch.equal(one[1], other[1])  # type: ignore[arg-type]


class Makers:
    """Which threads made microbatches ahead, and how many: what a feed enters around each."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        yield
        self.names.append(threading.current_thread().name)

    def settled(self, number: int) -> list[str]:
        """All of them, once there are ``number`` and no more come."""
        for _ in range(500):
            if len(self.names) >= number:
                break
            time.sleep(0.01)
        time.sleep(0.05)
        return self.names


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
def test_as_many_are_made_ahead_as_asked_those_of_the_next_batch_too(prefetch: int) -> None:
    makers, left = Makers(), []
    feed = feed_of(AugmentSettings(), 0, left, prefetch=prefetch, beside=makers)
    first, second = batch_of(3), batch_of(3, first=200)
    parts = feed.microbatches(first, [1, 1, 1])
    next(parts)
    ahead = min(3, 1 + prefetch) if prefetch else 0
    assert len(makers.settled(ahead)) == ahead
    left.append(second)
    given = 1
    for given, _ in enumerate(parts, 2):
        ahead = min(6, given + prefetch) if prefetch else 0
        assert len(makers.settled(ahead)) == ahead
    assert given == 3
    assert all(name.startswith("microbatch-maker") for name in makers.names)
    assert len(list(feed.held())) == 2 * min(3, prefetch)
    assert next(feed) is second
    assert [len(targets) for _, targets in feed.microbatches(second, [1, 1, 1])] == [1, 1, 1]  # type: ignore[arg-type]
    assert len(makers.names) == (6 if prefetch else 0)


def test_one_batch_can_be_the_next_one_for_ever() -> None:
    makers, batch = Makers(), batch_of(2)
    expected = made(feed_of(AugmentSettings(), 4), batch, [1, 1])[0]
    pixels = PixelMaker(CPU, AugmentSettings(), 4)
    with DevicePrefetcher(itertools.repeat(batch), lambda: True, pixels, prefetch=1, beside=makers) as feed:
        for times in range(1, 4):
            assert torch.equal(made(feed, next(feed), [1, 1])[0], expected)
            assert len(makers.settled(2 * times + 1)) == 2 * times + 1  # the first of the next time


def test_what_was_made_early_is_made_anew_when_targets_or_sizes_change() -> None:
    first, second, third = (batch_of(4, first=k) for k in (0, 10, 20))
    feed = feed_of(NONE, 0, [first, second, third], prefetch=2)
    made(feed, next(feed), [2, 2])
    assert len(list(feed.held())) == 4
    assert next(feed) is second
    second.targets[...] = 9  # as ``follow`` does
    feed.invalidate(second)
    assert made(feed, second, [2, 2])[1].tolist() == [9] * 4
    assert made(feed, next(feed), [3, 1])[1].tolist() == [0, 1, 2, 3]


def test_what_is_under_way_is_waited_for_and_the_rest_never_made() -> None:
    gate, begun = threading.Event(), []

    @contextlib.contextmanager
    def waits() -> Iterator[None]:
        begun.append(gate.wait(20))
        yield

    lane = CopyStreams(PixelMaker(CPU, NONE, 0), True, waits)
    sent = DeviceBatch(lane, batch_of(3), [1, 1, 1])
    assert sent.begin(2) == 0
    threading.Timer(0.05, gate.set).start()
    sent.cancel()
    assert begun == [True]
    assert sent.begin(2) == 1  # one is left
    sent.take()
    assert sent.begin(2) == 2
    lane.close()


def test_nobody_here_holds_what_was_given() -> None:
    feed = feed_of(AugmentSettings(), 0, prefetch=1)
    for images, _ in feed.microbatches(batch_of(3), [1, 1, 1]):
        assert images is not None
        given = weakref.ref(images)
        del images, _
        for _try in range(100):  # the thread that made it lets go of it a moment later
            if given() is None:
                break
            time.sleep(0.01)
        assert given() is None


def test_a_fault_of_the_thread_that_makes_them_is_raised_where_they_are_asked_for() -> None:
    def fails() -> contextlib.AbstractContextManager[None]:
        raise torch.OutOfMemoryError("tensors take too much")

    feed = feed_of(AugmentSettings(), 0, prefetch=1, beside=fails)
    with pytest.raises(torch.OutOfMemoryError, match="take too much"):
        next(feed.microbatches(batch_of(2), [1, 1]))


class Stream:
    """Stands in for a stream of a GPU on a CPU, where everything is done at once: notes who waits for whom."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes, self.recorded = name, notes, 0

    def record_event(self) -> Stream:
        self.recorded += 1
        self.notes.append(f"{self.name} records {self.recorded}")
        return self

    def wait_event(self, event: Stream) -> None:
        self.notes.append(f"{self.name} waits for {event.name}")

    def synchronize(self) -> None:
        self.notes.append(f"host waits for {self.name}")


@pytest.mark.parametrize("prefetch", [0, 1])
def test_streams_wait_for_each_other_and_memory_is_kept_for_them(
    prefetch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    computing, side, making = (Stream(name, notes) for name in ("computing", "side", "making"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: notes.append(f"kept for {stream.name}"))
    feed = feed_of(AugmentSettings(), 4)
    feed._prefetch, feed._lane.copying = prefetch, side  # type: ignore[assignment]
    feed._lane.making = making if prefetch else None  # type: ignore[assignment]
    expected = made(feed_of(AugmentSettings(), 4), batch_of(2), [1, 1])[0]
    assert torch.equal(made(feed, batch_of(2), [1, 1])[0], expected)
    ahead = ["making waits for side", "kept for making", "kept for making", "making records"]
    taken = ["computing waits for making", "kept for computing", "kept for computing"]
    held = ["host waits for computing", "computing records"]  # or more would be made than the GPU has computed
    assert [note.rstrip(" 123") for note in notes] == (
        ["side records", held[1], *ahead, *ahead, *taken, *held, "host waits for side", *taken]
        if prefetch
        else ["side records", "computing waits for side", *taken[1:], "host waits for side"]
    )


def test_all_feeds_of_a_device_share_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation has a feed of its own, and torch hands out 32 streams in turn."""
    cuda, made_streams, notes = torch.device("cuda", 0), itertools.count(), list[str]()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(f"stream {next(made_streams)}", notes))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("computing", notes))
    monkeypatch.setattr(Stream, "wait_stream", Stream.wait_event, raising=False)
    pixels = PixelMaker(CPU, NONE, 0)
    pixels.device = cuda
    feed_stream.cache_clear()
    try:
        lanes = [CopyStreams(pixels, True, contextlib.nullcontext) for _ in range(20)]
    finally:
        feed_stream.cache_clear()
    assert next(made_streams) == 2
    assert lanes[0].copying is lanes[-1].copying is not lanes[-1].making


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_cuda_device_is_fed_what_the_cpu_is_fed(prefetch: int) -> None:
    table = tile_table([40])
    stream = TileStream.over(table, epochs=1).read(pool_of(table)).batch(8)
    on_cpu = feed_of(AugmentSettings(), 3)
    on_cuda = PixelMaker(torch.device("cuda"), AugmentSettings(), 3)
    plain = [made(on_cpu, batch, [3, 5])[0] for batch in iter(stream)]
    with (
        iter(stream.prefetch(allocate=allocate_pinned)) as tiles,
        DevicePrefetcher(tiles, tiles.ready, on_cuda, prefetch=prefetch) as feed,
    ):
        for batch, expected in zip(feed, plain, strict=True):
            images = made(feed, batch, [3, 5])[0]
            batch.release()
            assert torch.allclose(images.cpu(), expected, atol=1e-4)
