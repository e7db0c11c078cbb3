"""Reading ahead: within its bytes, in order, errors in their place, and no thread outlives its iterator."""

import gc
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from pipelines.stream.batch import BufferPool
from pipelines.stream.iterator import MAX_BATCHES_AHEAD, BuffersHeldError, Readahead
from pipelines.stream.order import BatchRequest
from pipelines.stream.stream import TileStream
from tests.helpers.tiles import TILE, pool_of, tile_table

BATCH_BYTES = 2 * TILE * TILE * 3 + 2 * 8


def stream_of(count=40):
    table = tile_table([count])
    return TileStream.over(table, epochs=1).read(pool_of(table)).label(np.arange(count)).batch(2)


def counting(allocated):
    """numpy's allocator, which adds its bytes to ``allocated``."""

    def allocate(shape, dtype):
        array = np.zeros(shape, dtype)
        allocated.append(array.nbytes)
        return array

    return allocate


def reader_threads():
    return [t for t in threading.enumerate() if t.name.startswith("tile-reader")]


@pytest.mark.parametrize(("max_bytes", "buffers"), [(0, 1), (2 * BATCH_BYTES - 1, 1), (3 * BATCH_BYTES, 3)])
def test_buffers_stay_within_max_bytes_and_are_reused(max_bytes, buffers):
    allocated, seen = [], 0
    for batch in iter(stream_of().prefetch(max_bytes, 2, counting(allocated))):
        seen += len(batch)
        batch.release()
    assert seen == 40
    assert sum(allocated) == buffers * BATCH_BYTES


def test_asking_for_more_than_the_budget_allows_says_so_and_can_be_mended():
    with iter(stream_of().prefetch(2 * BATCH_BYTES, 2)) as batches:
        held = [next(batches), next(batches)]
        before = held[1].images.copy()
        assert not batches.ready()
        with pytest.raises(BuffersHeldError, match=r"holds all 2 batch buffers of 400 bytes .*batch\.release\(\)"):
            next(batches)
        assert [b.first_sample for b in held] == [0, 2]
        held[0].release()
        held[0].release()
        again = next(batches)
        assert again.first_sample == 4
        with pytest.raises(BuffersHeldError):
            next(batches)
        again.release()
        for _ in range(10):
            next(batches).release()
        assert (held[1].images == before).all()


def run(fill, batches=4, threads=3):
    """Batches of 5 samples, filled by ``fill(sample)``, buffers for all of them."""

    def requests():
        for first in range(0, 5 * batches, 5):
            samples, every = np.arange(first, first + 5), np.ones(5, bool)
            yield BatchRequest(samples, samples * 2, first, every, every)

    def fill_one(sample, row, image, target):
        fill(sample)
        image[...], target[...] = sample, sample
        return row + 1

    pool = BufferPool((5, 1, 1, 3), (5,), np.int64, 1 << 20, np.empty)
    return Readahead(threads, pool, requests(), fill_one), pool


def test_samples_of_several_batches_are_in_flight():
    first_may_end = threading.Event()

    def fill(sample):
        if sample == 0:
            assert first_may_end.wait(10)
        if sample == 19:
            first_may_end.set()  # the last sample of the last batch ends before the first of all

    readahead, _ = run(fill)
    assert readahead.next().first_sample == 0
    readahead.close()


def test_an_error_surfaces_at_its_batch_and_the_first_one_wins():
    def fill(sample):
        if sample in (7, 8):
            time.sleep(0.02 if sample == 7 else 0)
            raise OSError(f"sample {sample}")

    readahead, pool = run(fill)
    assert readahead.next() is not None
    time.sleep(0.1)
    assert not readahead.ready()  # a fault is for `next` to raise
    with pytest.raises(OSError, match="sample 7"):
        readahead.next()
    readahead.close()
    assert len(pool._free) == pool.made - 1  # all but the batch that was given


def test_after_an_error_the_iterator_is_closed_and_its_state_is_that_of_the_batches_given():
    class Target:
        dtype = np.int64
        is_drawn = False

        def shape(self, tile):
            return ()

        def fill(self, row, *rest):
            if row == 5:
                raise ZeroDivisionError("a fault of the target")

        def fingerprint(self):
            return "test"

    batches = iter(replace(stream_of(8), target=Target()))
    given = [next(batches), next(batches)]
    with pytest.raises(ZeroDivisionError, match="a fault of the target") as caught:
        next(batches)
    assert "sample 5: slide s0, Region(l0_x=40" in caught.value.__notes__[0]
    assert batches.get_state()["batch"] == len(given)
    assert reader_threads() == []
    assert next(batches, None) is None


def test_threads_end_with_an_iterator_that_is_closed_abandoned_or_exhausted():
    with iter(stream_of().prefetch(threads=3)) as batches:
        next(batches)
        assert len(reader_threads()) == 3
    assert reader_threads() == []
    assert next(batches, None) is None
    batches = iter(stream_of().prefetch(threads=3))
    next(batches)
    del batches
    gc.collect()
    assert reader_threads() == []
    for batch in iter(stream_of()):
        batch.release()
    assert reader_threads() == []


@pytest.mark.process
def test_a_process_ends_with_an_iterator_still_open():
    script = """
import numpy as np
from tests.helpers.tiles import pool_of, tile_table
from pipelines.stream.stream import TileStream
table = tile_table([4])
batches = iter(TileStream.over(table).read(pool_of(table)).batch(2).prefetch(threads=3))
next(batches)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_small_batches_are_not_read_ahead_without_end():
    allocated, table = [], tile_table([4])
    stream = TileStream.over(table).read(pool_of(table)).batch(2)
    with iter(stream.prefetch(1 << 30, 2, counting(allocated))) as batches:
        for _ in range(100):
            next(batches).release()
    assert sum(allocated) <= (MAX_BATCHES_AHEAD + 1) * BATCH_BYTES


def test_batches_can_be_released_from_another_thread():
    total = 0
    for batch in iter(stream_of().prefetch(2 * BATCH_BYTES, 2)):
        total += len(batch)
        thread = threading.Thread(target=batch.release)
        thread.start()
        thread.join()
    assert total == 40


def test_reading_goes_on_while_the_caller_computes():
    with iter(stream_of().prefetch(3 * BATCH_BYTES, 1)) as batches:
        next(batches).release()
        deadline = time.monotonic() + 10
        while not batches.ready():
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_batches_come_in_order_whatever_takes_longest():
    readahead, _ = run(lambda sample: time.sleep(0.03 if sample == 0 else 0))
    for k in range(4):
        batch, samples = readahead.next(), range(5 * k, 5 * k + 5)
        assert batch.targets.tolist() == list(samples)
        assert batch.rows.tolist() == [2 * s + 1 for s in samples]
    assert readahead.next() is None
    readahead.close()
