"""The tiles of microbatches that a rank draws while a step runs.

Takes the batch that was read ahead, which has the rank's own share, and the stream it came from; gives the engine any
microbatch it asks for. One of another rank's share is read when it is drawn, by all reading threads, since nobody knows
before who will compute it; the batch of the rank whose it was has been read in vain.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import numpy as np

from app.training.batches import microbatches_of
from parallel.engine.step import Microbatch
from parallel.engine.tickets import DrawnMicrobatches
from pipelines.stream.batch import Batch
from pipelines.stream.device import DeviceFeed
from pipelines.stream.device_batch import Maker
from pipelines.stream.stream import TileStream


class DrawnTiles:
    """Microbatches of the steps of one rank.

    Args:
        stream: that batches are read ahead from.
        pixels: turns tiles into the model's input.
        ranges: tiles of the global batch in each microbatch, over all ranks.
        share: microbatches that are read ahead, rising.

    Attributes:
        replaced: tiles computed in the last step that stand in for one that cannot be read.
        waited_s: in the last step, for tiles that were not read ahead.
        drawn: microbatches so far.
    """

    def __init__(self, stream: TileStream, pixels: Maker, ranges: Sequence[range], share: Sequence[int]) -> None:
        self._stream = stream
        self._feed = DeviceFeed(iter(()), lambda: False, pixels)
        self._ranges = ranges
        self._share = tuple(share)
        self._number = -1
        self._read: dict[int, Batch] = {}
        self._own: Iterator[Microbatch] = iter(())
        self.replaced = self.drawn = 0
        self.waited_s = 0.0

    @contextlib.contextmanager
    def of_step(self, feed: DeviceFeed, batch: Batch) -> Iterator[DrawnMicrobatches]:
        """The microbatches of a step on the global batch that ``batch``, of ``feed``, is this rank's share of."""
        number = batch.first_sample // self._stream.global_batch
        if number != self._number:
            self.release()
        self._number, self._batch, self._tiles = number, batch, 0
        self.replaced, self.waited_s = 0, 0.0
        sizes = [len(self._ranges[i]) for i in self._share]
        self._own = microbatches_of(feed, batch, sizes)
        try:
            yield DrawnMicrobatches(self._share, self._take)
        finally:
            self._own = iter(())  # what others have computed of the share is made no more

    def _take(self, i: int) -> Microbatch:
        self.drawn += 1
        if i in self._share:
            start, self._tiles = self._tiles, self._tiles + len(self._ranges[i])
            self._count(self._batch, slice(start, self._tiles))
            return next(self._own)
        if i not in self._read:
            begun_s = time.perf_counter()
            self._read[i] = self._stream.read_batch(self._number, self._ranges[i])
            self.waited_s += time.perf_counter() - begun_s
        batch = self._read[i]
        self._count(batch, slice(None))
        return next(microbatches_of(self._feed, batch, [len(batch)]))

    def release(self) -> None:
        """Give back what was read for the last step."""
        for batch in self._read.values():
            batch.release()
        self._read.clear()

    def close(self) -> None:
        self.release()
        self._feed.close()

    def _count(self, batch: Batch, tiles: slice) -> None:
        self.replaced += int(np.count_nonzero((batch.has_image & (batch.rows != batch.wanted))[tiles]))
