"""The device feed on the CPU: values, orientation, and independence of how a batch is cut or made ahead."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from dataclasses import replace

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
NONE, VARIED = AugmentSettings(augment="none"), AugmentSettings()
MEAN, STD = (np.array(values)[:, None, None] for values in IMAGENET)


def batch_of(n, size=16, first=100, *, masks=False):
    images = np.random.default_rng(0).integers(0, 256, (n, size, size, 3)).astype(np.uint8)
    targets = images[..., 0] // 64 if masks else np.arange(n)
    samples, every = np.arange(first, first + n), np.ones(n, bool)
    return Batch(images, targets, samples, samples, first, lambda: None, every, every, samples)


def feed_of(settings, seed=0, left=None, *, prefetch=0, beside=None):
    """On the CPU, of batches that are there at once; ``left`` loses those that were taken."""
    left = [] if left is None else left
    pixels = PixelMaker(CPU, settings, seed)
    around = beside or contextlib.nullcontext
    return DevicePrefetcher(
        iter(lambda: left.pop(0), None), lambda: bool(left), pixels, prefetch=prefetch, thread_context=around
    )


def made(feed, batch, sizes):
    images, targets = zip(*feed.microbatches(batch, sizes), strict=True)
    assert [len(each) for each in images] == sizes
    return torch.cat(images), torch.cat(targets)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("normalisation", [IMAGENET, ((0.5, 0.5, 0.5), (0.2, 0.3, 0.4))])
def test_pixels_are_normalised_and_the_batch_is_left_as_it_is(normalisation, channels_last):
    batch = batch_of(3)
    before = batch.images.copy()
    feed = DevicePrefetcher(iter(()), lambda: False, PixelMaker(CPU, NONE, 0, normalisation, channels_last))
    images, targets = next(feed.microbatches(batch, [3]))
    mean, std = (np.array(v) for v in normalisation)
    assert images.dtype == torch.float32
    assert np.abs(images.numpy() - ((before / 255 - mean) / std).transpose(0, 3, 1, 2)).max() < 1e-5
    assert images.is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    assert targets.tolist() == [0, 1, 2]
    assert (batch.images == before).all()
    batch.targets[...] = 77
    assert targets.tolist() == [0, 1, 2], "targets outlive the batch"


@pytest.mark.parametrize("sizes", [[7], [1] * 7, [3, 4]])
def test_the_cut_into_microbatches_changes_no_bit(sizes):
    feed, batch = feed_of(VARIED, 4), batch_of(7, masks=True)
    for whole, parts in zip(made(feed, batch, [2, 2, 3]), made(feed, batch, sizes), strict=True):
        assert torch.equal(whole, parts)
    with pytest.raises(ValueError, match=r"\[2, 1\] tiles do not make up a batch of 7"):
        next(feed.microbatches(batch, [2, 1]))


def test_ranks_and_parts_of_a_batch_draw_what_one_process_draws():
    batch = batch_of(6, masks=True)
    images, masks = made(feed_of(VARIED, 4), batch, [6])
    rows = {name: getattr(batch, name)[3:] for name in ("rows", "samples", "has_image", "has_target", "wanted")}
    half = replace(batch, images=batch.images[3:], targets=batch.targets[3:], **rows)
    assert torch.equal(images[3:], made(feed_of(VARIED, 4), half, [3])[0])
    some = np.arange(6) < 2
    part = replace(batch, images=batch.images[:2], targets=batch.targets[2:], has_image=some, has_target=~some)
    first, second, third = feed_of(VARIED, 4).microbatches(part, [2, 1, 3])
    assert torch.equal(first[0], images[:2])
    assert (first[1], second[0], third[0]) == (None, None, None)
    assert torch.equal(torch.cat([second[1], third[1]]), masks[2:])


def test_tile_and_mask_turn_together():
    batch = batch_of(16, masks=True)
    images, masks = made(feed_of(AugmentSettings(stain_jitter=0, brightness=0), 2), batch, [16])
    red = torch.round((images[:, 0] * IMAGENET[1][0] + IMAGENET[0][0]) * 255)
    assert torch.equal(red // 64, masks.float())
    assert masks.dtype == torch.uint8
    assert sum(not np.array_equal(masks[k].numpy(), batch.targets[k]) for k in range(16)) > 8
    assert torch.equal(masks.flatten(1).long().sum(1), torch.from_numpy(batch.targets.astype(int).sum((1, 2))))


def test_stains_change_as_the_numpy_version_changes_them():
    settings, batch = AugmentSettings(flip=False, stain_jitter=0.1, brightness=0.2), batch_of(4)
    images, _ = made(feed_of(settings, 9), batch, [4])
    drawn = draw(settings, 9, batch.samples)
    for k in range(4):
        expected = batch.images[k].copy()
        apply_jitter(expected, drawn.rgb[0][k], drawn.rgb[1][k])
        found = (images[k].numpy() * STD + MEAN) * 255
        assert np.abs(found - expected.transpose(2, 0, 1)).max() <= 0.51  # that one rounds to uint8
        assert (expected != batch.images[k]).mean() > 0.5


def test_the_feed_gives_the_batches_of_its_source_and_takes_the_next_one_early():
    table = tile_table([9])
    stream = TileStream.over(table, epochs=1).read(pool_of(table)).batch(2)
    plain = [b.rows.tolist() for b in iter(stream)]
    given, early = [], False
    with iter(stream) as tiles, DevicePrefetcher(tiles, tiles.ready, PixelMaker(CPU, VARIED, 0)) as feed:
        for batch in feed:
            given.append(batch.rows.tolist())
            for _ in feed.microbatches(batch, [1] * len(batch)):
                time.sleep(0.01)  # as computing does: the next batch is read, and sent between two microbatches
            batch.release()
            early = early or tiles.get_state()["batch"] > len(given)
    assert given == plain
    assert early


def test_what_was_taken_early_is_released_when_the_feed_is_closed():
    released = []
    batches = [replace(batch_of(2, first=k), release=lambda k=k: released.append(k)) for k in range(3)]
    with feed_of(NONE, 0, batches, prefetch=1) as feed:
        made(feed, next(feed), [1, 1])
    assert released == [1]
    assert len(batches) == 1


def test_the_feed_says_whether_the_next_batch_is_there_as_it_was_wanted():
    whole, other = batch_of(2), replace(batch_of(2), rows=np.array([100, 7]))
    feed = feed_of(NONE, 0, [whole, other])
    assert [feed.next_as_wanted() for _ in range(2)] == [True, True]
    assert next(feed) is whole
    assert not feed.next_as_wanted()
    assert next(feed) is other
    assert not feed.next_as_wanted()


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("prefetch", [1, 3, 9])
def test_microbatches_made_ahead_are_the_same_to_the_last_bit(prefetch, masks):
    batches = [batch_of(5, 24, 100 * k, masks=masks) for k in range(3)]
    plain, ahead = feed_of(VARIED, 4), feed_of(VARIED, 4, list(batches), prefetch=prefetch)
    for batch in batches:
        assert next(ahead) is batch
        found = list(ahead.microbatches(batch, [2, 2, 1]))
        for one, other in zip(plain.microbatches(batch, [2, 2, 1]), found, strict=True):
            assert torch.equal(one[0], other[0])
            assert other[0].stride() == one[0].stride()
            assert torch.equal(one[1], other[1])


class Makers:
    """Which threads made microbatches ahead, and how many: what a feed enters around each."""

    def __init__(self):
        self.names = []

    @contextlib.contextmanager
    def __call__(self):
        yield
        self.names.append(threading.current_thread().name)

    def assert_settles_at(self, number):
        """There are ``number``, once they are made, and no more come."""
        deadline_s = time.monotonic() + 5
        while len(self.names) < number and time.monotonic() < deadline_s:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(self.names) == number


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
def test_as_many_are_made_ahead_as_asked_those_of_the_next_batch_too(prefetch):
    makers, left = Makers(), []
    feed = feed_of(VARIED, 0, left, prefetch=prefetch, beside=makers)
    first, second = batch_of(3), batch_of(3, first=200)
    parts = feed.microbatches(first, [1, 1, 1])
    next(parts)
    makers.assert_settles_at(min(3, 1 + prefetch) if prefetch else 0)
    left.append(second)
    given = 1
    for given, _ in enumerate(parts, 2):
        makers.assert_settles_at(min(6, given + prefetch) if prefetch else 0)
    assert given == 3
    assert all(name.startswith("microbatch-maker") for name in makers.names)
    assert len(list(feed.held())) == 2 * min(3, prefetch)
    assert next(feed) is second
    assert [len(targets) for _, targets in feed.microbatches(second, [1, 1, 1])] == [1, 1, 1]
    assert len(makers.names) == (6 if prefetch else 0)


def test_one_batch_can_be_the_next_one_for_ever():
    makers, batch = Makers(), batch_of(2)
    expected = made(feed_of(VARIED, 4), batch, [1, 1])[0]
    pixels = PixelMaker(CPU, VARIED, 4)
    with DevicePrefetcher(itertools.repeat(batch), lambda: True, pixels, prefetch=1, thread_context=makers) as feed:
        for times in range(1, 4):
            assert torch.equal(made(feed, next(feed), [1, 1])[0], expected)
            makers.assert_settles_at(2 * times + 1)  # the first of the next time


def test_what_was_made_early_is_made_anew_when_targets_or_sizes_change():
    first, second, third = (batch_of(4, first=k) for k in (0, 10, 20))
    feed = feed_of(NONE, 0, [first, second, third], prefetch=2)
    made(feed, next(feed), [2, 2])
    assert len(list(feed.held())) == 4
    assert next(feed) is second
    second.targets[...] = 9  # as ``follow`` does
    feed.invalidate(second)
    assert made(feed, second, [2, 2])[1].tolist() == [9] * 4
    assert made(feed, next(feed), [3, 1])[1].tolist() == [0, 1, 2, 3]


def test_what_is_under_way_is_waited_for_and_the_rest_never_made():
    gate, begun = threading.Event(), []

    @contextlib.contextmanager
    def waits():
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


def test_nobody_here_holds_what_was_given():
    feed = feed_of(VARIED, prefetch=1)
    for images, _ in feed.microbatches(batch_of(3), [1, 1, 1]):
        given = weakref.ref(images)
        del images, _
        deadline_s = time.monotonic() + 1  # the thread that made it lets go of it a moment later
        while given() is not None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert given() is None


def test_a_fault_of_the_thread_that_makes_them_is_raised_where_they_are_asked_for():
    def fails():
        raise torch.OutOfMemoryError("tensors take too much")

    with pytest.raises(torch.OutOfMemoryError, match="take too much"):
        next(feed_of(VARIED, prefetch=1, beside=fails).microbatches(batch_of(2), [1, 1]))


class Stream:
    """Stands in for a stream of a GPU on a CPU, where everything is done at once: notes who waits for whom."""

    def __init__(self, name, notes):
        self.name, self.notes, self.recorded = name, notes, 0

    def record_event(self):
        self.recorded += 1
        self.notes.append(f"{self.name} records {self.recorded}")
        return self

    def wait_event(self, event):
        self.notes.append(f"{self.name} waits for {event.name}")

    wait_stream = wait_event

    def synchronize(self):
        self.notes.append(f"host waits for {self.name}")


@pytest.mark.parametrize("prefetch", [0, 1])
def test_streams_wait_for_each_other_and_memory_is_kept_for_them(prefetch, monkeypatch):
    notes = []
    computing, side, making = (Stream(name, notes) for name in ("computing", "side", "making"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: notes.append(f"kept for {stream.name}"))
    feed = feed_of(VARIED, 4)
    feed._prefetch, feed._lane.copying, feed._lane.making = prefetch, side, making if prefetch else None
    expected = made(feed_of(VARIED, 4), batch_of(2), [1, 1])[0]
    assert torch.equal(made(feed, batch_of(2), [1, 1])[0], expected)
    ahead = ["making waits for side", "kept for making", "kept for making", "making records"]
    taken = ["computing waits for making", "kept for computing", "kept for computing"]
    held = ["host waits for computing", "computing records"]  # or more would be made than the GPU has computed
    assert [note.rstrip(" 123") for note in notes] == (
        ["side records", held[1], *ahead, *ahead, *taken, *held, "host waits for side", *taken]
        if prefetch
        else ["side records", "computing waits for side", *taken[1:], "host waits for side"]
    )


def test_all_feeds_of_a_device_share_its_streams(monkeypatch):
    """A validation has a feed of its own, and torch hands out 32 streams in turn."""
    made_streams, pixels = itertools.count(), PixelMaker(CPU, NONE, 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(f"stream {next(made_streams)}", []))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("computing", []))
    pixels.device = torch.device("cuda", 0)
    feed_stream.cache_clear()
    try:
        lanes = [CopyStreams(pixels, True, contextlib.nullcontext) for _ in range(20)]
    finally:
        feed_stream.cache_clear()
    assert next(made_streams) == 2
    assert lanes[0].copying is lanes[-1].copying is not lanes[-1].making


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_a_cuda_device_is_fed_what_the_cpu_is_fed(prefetch):
    table = tile_table([40])
    stream = TileStream.over(table, epochs=1).read(pool_of(table)).batch(8)
    plain = [made(feed_of(VARIED, 3), batch, [3, 5])[0] for batch in iter(stream)]
    on_cuda = PixelMaker(torch.device("cuda"), VARIED, 3)
    with (
        iter(stream.prefetch(allocate=allocate_pinned)) as tiles,
        DevicePrefetcher(tiles, tiles.ready, on_cuda, prefetch=prefetch) as feed,
    ):
        for batch, expected in zip(feed, plain, strict=True):
            images = made(feed, batch, [3, 5])[0]
            batch.release()
            assert torch.allclose(images.cpu(), expected, atol=1e-4)


def test_oblong_tiles_are_turned_by_halves_alone():
    """Each of the four ways as often as the others: none are lost to turns that do not fit."""
    image = torch.arange(6, dtype=torch.uint8).reshape(1, 2, 3, 1).expand(32, 2, 3, 3)
    pixels = PixelMaker(CPU, AugmentSettings(stain_jitter=0, brightness=0), 1)
    _, turned = pixels.make(None, image[..., 0], np.arange(32), np.arange(32))
    corners = [int(tile[0, 0]) for tile in turned]
    assert [corners.count(k) > 3 for k in range(6)] == [True, False, True, True, False, True]
