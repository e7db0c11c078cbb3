"""Who reads what: pixels and targets on different ranks, in the same order, of the same tiles."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from app.training.batches import RankReading, microbatches_of, sizes_of_part
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import NeededInputs
from parallel.schedule.shares import split_batch
from pipelines.catalog.handles import SlidePool
from pipelines.slides.geometry import TileBox
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.device import DevicePrefetcher
from pipelines.stream.device_pixels import PixelMaker
from pipelines.stream.iterator import TileIterator
from pipelines.stream.stream import TileStream
from tests.helpers.tiles import TILE, memory_specs, tile_table

NOTHING, BOTH = NeededInputs(False, False), NeededInputs(True, True)
IMAGES, TARGETS = NeededInputs(True, False), NeededInputs(False, True)
TABLE = tile_table([5, 6])


class Recorded(LocalCommunicator):
    """One rank that is told what the others say: ``sums`` are added to what it gives, in turn."""

    def __init__(self, sums: Sequence[Tensor] = ()) -> None:
        self.sums = list(sums)

    def all_reduce(self, tensor: Tensor) -> None:
        if self.sums:
            tensor += self.sums.pop(0)


def recorded(*sums: list[int]) -> Communicator:
    return Recorded([torch.tensor(values) for values in sums])


def stream_of(*, damaged: bool = False) -> TileStream:
    specs = memory_specs(TABLE, lambda spec: replace(spec, bad=frozenset({2} if damaged and not spec.number else ())))
    return TileStream.over(TABLE, epochs=1).read(SlidePool(specs, 2)).label(np.arange(11))


def feed_of(tiles: TileIterator) -> DevicePrefetcher:
    return DevicePrefetcher(tiles, tiles.ready, PixelMaker(torch.device("cpu"), AugmentSettings(), 0))


def test_a_rank_reads_the_microbatches_it_wants() -> None:
    ranges = split_batch(5, 3)
    reading = RankReading.of(recorded(), 5, ranges, [IMAGES, NOTHING, BOTH])
    assert not reading.apart
    assert reading.sizes == (2, 2, 1)
    stream = reading.sharded(stream_of())
    assert (stream.rows, stream.image_rows, stream.target_rows) == ((0, 1, 2, 3, 4), (0, 1, 4), (4,))
    with iter(stream) as tiles:
        parts = list(microbatches_of(feed_of(tiles), next(tiles), (2, 2, 1)))
    assert [(part.images is not None, part.targets is not None) for part in parts] == [
        tuple(want) for want in (IMAGES, NOTHING, BOTH)
    ]
    assert [part.shape for part in parts] == [(2, 3, TILE, TILE), (2, 3, TILE, TILE), (1, 3, TILE, TILE)]


def test_a_group_reads_its_own_part_of_the_batch() -> None:
    ranges = split_batch(7, 4)[2:]
    stream = RankReading.of(recorded(), 7, ranges, [BOTH, BOTH]).sharded(stream_of())
    assert stream.rows == (4, 5, 6)


def test_labels_follow_the_tile_that_was_read_on_the_rank_with_the_pixels() -> None:
    def rank(communicator: Communicator, _: object) -> tuple[bool, list[int], list[int]]:
        wants = [[IMAGES] * 2, [TARGETS] * 2][communicator.rank]
        reading = RankReading.of(communicator, 4, split_batch(4, 2), wants)
        assert reading.apart
        with iter(reading.sharded(stream_of(damaged=communicator.rank == 0))) as batches:
            batch = next(batches)
            changed = reading.settle(batches, batch)
            return changed, batch.rows.tolist(), batch.targets.tolist()

    read = [0, 1, 3, 3]
    assert run_on_threads(2, rank) == [(False, read, []), (True, read, read)]


def test_members_of_a_team_go_on_with_the_same_tiles_where_one_part_is_damaged() -> None:
    def rank(communicator: Communicator, _: object) -> tuple[bool, list[int], tuple[int, ...]]:
        rows = (0, TILE // 2) if communicator.rank == 0 else (TILE // 2, TILE)
        box = TileBox(*rows, 0, TILE)
        reading = RankReading.of(communicator, 4, split_batch(4, 2), [BOTH] * 2, part=(box, box))
        assert reading.apart
        with iter(reading.sharded(stream_of(damaged=communicator.rank == 1))) as batches:
            batch = next(batches)
            changed = reading.settle(batches, batch)
            return changed, batch.rows.tolist(), batch.sides(0)

    (first, *read), (second, *same) = run_on_threads(2, rank)
    assert (first, second) == (True, False)
    assert read == same == [[0, 1, 3, 3], (TILE, TILE)]


@pytest.mark.parametrize("damaged", [False, True])
def test_ranks_settle_a_batch_only_if_a_tile_of_it_is_replaced_or_it_was_not_read_in_time(
    damaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, lease = threading.Event(), SlidePool.lease
    monkeypatch.setattr(SlidePool, "lease", lambda pool, slide_id: gate.wait(20) and lease(pool, slide_id))
    reading = RankReading.of(recorded([1]), 4, split_batch(4, 2), [IMAGES] * 2)
    with iter(reading.sharded(stream_of(damaged=damaged))) as tiles, feed_of(tiles) as feed:
        assert reading.needs_sync(feed)
        gate.set()
        while not tiles.ready():
            time.sleep(0.001)
        assert reading.needs_sync(feed) == damaged


def test_where_pixels_and_targets_are_read_together_nothing_is_settled() -> None:
    reading = RankReading.of(recorded(), 4, split_batch(4, 2), [BOTH] * 2)
    with iter(reading.sharded(stream_of(damaged=True))) as tiles, feed_of(tiles) as feed:
        assert not reading.needs_sync(feed)
        assert not reading.settle(tiles, next(feed))


def test_ranks_without_labels_take_part_when_any_has_them_apart() -> None:
    assert RankReading.of(recorded([1]), 4, split_batch(4, 2), [NOTHING] * 2).apart
    assert not RankReading.of(recorded([0]), 4, split_batch(4, 2), [NOTHING] * 2).apart


def test_a_short_batch_is_cut_into_microbatches_of_the_usual_size() -> None:
    with iter(stream_of().batch(4)) as batches:
        assert [sizes_of_part(batch, 3) for batch in batches] == [[3, 1], [3, 1], [3]]
    with iter(stream_of().batch(4).shard(range(3, 4))) as batches:
        assert [sizes_of_part(batch, 3) for batch in batches] == [[1], [1], []]


def test_a_member_that_has_some_samples_of_a_microbatch_reads_these_alone() -> None:
    wants = (NeededInputs(True, True),) * 2
    ranges = (range(4), range(4, 7))
    reading = RankReading(LocalCommunicator(), 7, ranges, wants, False, samples=lambda count: range(count // 2, count))
    assert reading.own == (range(2, 4), range(5, 7))
    assert (reading.sizes, reading.counts) == ((2, 2), (4, 3))
