"""The iterator over a ``TileStream``: the one thing on the data side that has state, and that state is one number.

Takes where samples come from and how one is read; gives batches in order, read ahead by threads. ``get_state`` after k
batches, handed to ``set_state`` of a new iterator, on any number of ranks and threads, gives exactly the batches that
were left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from pipelines.slides.slide import SlideError
from pipelines.stream.batch import Batch, BufferPool
from pipelines.stream.order import Rows, SampleSource
from pipelines.stream.prefetch import BuffersHeldError, Readahead
from pipelines.stream.read import MAX_FAULTS, SampleReader


class TileIterator:
    """Batches of a stream. One consumer; a context manager; ``close`` it, or let it go, and its threads end.

    Args:
        source: says what is in each batch.
        reader: reads one sample.
        buffers: where batches are read to.
        threads: that read.
        fingerprint: all that decides what sample i is.
    """

    def __init__(
        self,
        source: SampleSource,
        reader: SampleReader,
        buffers: BufferPool,
        threads: int,
        fingerprint: Callable[[], dict[str, str | int]],
    ) -> None:
        self._source = source
        self._reader = reader
        self._buffers = buffers
        self._threads = threads
        self._fingerprint = fingerprint
        self._batch = 0
        self._readahead: Readahead | None = None
        self._stop: Callable[[], object] = lambda: None
        self._closed = False
        self._followed, self._follows = -1, 0  # the batch that ranks settle, by its first sample, and how often

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """The next batch; its arrays are valid until its ``release`` is called.

        Raises:
            SlideError: a sample could not be read, nor any tile in its place.
            BuffersHeldError: the caller has released no batch and ``max_bytes`` allows no more.
        """
        if self._closed:
            raise StopIteration
        try:
            batch = self._running().next()
        except BuffersHeldError:
            raise
        except BaseException:
            self.close()
            raise
        if batch is None:
            self.close()
            raise StopIteration
        self._batch += 1
        return batch

    def ready(self) -> bool:
        """Return whether the next batch could be had without waiting."""
        return not self._closed and self._running().ready()

    def follow(self, batch: Batch, rows: Rows) -> bool:
        """Make the targets of ``batch`` those of the tiles whose pixels were read, on whatever rank.

        Of parts of tiles the pixels follow, too: a tile may be damaged in one rank's part alone. What cannot be read
        here either is replaced in its turn, as ``batch.rows`` then says: the ranks that share tiles exchange rows and
        follow ``rows_to_follow`` until they have the same.

        Args:
            rows: int64 (n,), rows of the table that were read for ``batch.samples``.

        Returns:
            whether anything had to be filled again, because its tile was replaced.

        Raises:
            SlideError, OSError: what is to be read of a row cannot be; or, on all ranks alike, one or another of them
                could not read ``MAX_FAULTS`` tiles in turn.
        """
        self._follows = self._follows + 1 if self._followed == batch.first_sample else 1
        self._followed = batch.first_sample
        if self._follows > MAX_FAULTS:
            raise SlideError(
                f"ranks that read parts of the same tiles could not read {MAX_FAULTS} tiles in turn, each some of "
                "them: check the disk, or take out the slides that are named as failed"
            )
        shared = batch.has_image & (batch.parts is not None)
        late = np.flatnonzero((batch.has_target | shared) & (batch.rows != rows)).tolist()
        batch.rows[...] = rows
        for position in late:
            sample, row = int(batch.samples[position]), int(rows[position])
            target = batch.target(position) if batch.has_target[position] else None
            if not shared[position]:
                assert target is not None
                batch.rows[position] = self._reader.fill_target(sample, row, target)
            elif row >= 0:
                batch.rows[position] = self._reader.fill(sample, row, batch.image(position), target)
            else:  # another rank has left it out, and has it blank
                batch.image(position)[...] = 0
                if target is not None:
                    target[...] = 0
        return bool(late)

    def get_state(self) -> dict[str, Any]:
        """Return where the iterator is, to be saved as JSON: batches given so far, and the stream's fingerprint."""
        return {"batch": self._batch, "stream": dict(self._fingerprint())}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from where ``get_state`` was called.

        Raises:
            ValueError: the state belongs to a stream with other settings; names them.
        """
        saved, ours = state["stream"], self._fingerprint()
        differing = [
            f"{key} was {saved.get(key, 'not set')}, now {ours.get(key, 'not set')}"
            for key in sorted({*saved, *ours})
            if saved.get(key) != ours.get(key)
        ]
        if differing:
            raise ValueError(
                "this stream cannot go on from the saved state, which is of other settings: "
                + "; ".join(differing)
                + ". Give the settings of then, or start anew"
            )
        self._halt()
        self._batch = state["batch"]
        self._closed = False

    def close(self) -> None:
        """End the reading threads. Batches already given stay valid until released."""
        self._halt()
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _running(self) -> Readahead:
        if self._readahead is None:
            requests = self._source.requests(self._batch)
            self._readahead = Readahead(self._threads, self._buffers, requests, self._reader.fill)
            # Neither the threads nor `close` know this iterator, so they end with it, and at exit at the latest.
            self._stop = weakref.finalize(self, self._readahead.close)
        return self._readahead

    def _halt(self) -> None:
        self._stop()
        self._readahead = None


def rows_to_follow(read: Rows, asked: Rows) -> Rows:
    """Return which rows the ranks that share tiles ``follow`` next, int64 (n,): of each tile that all have read what
    they have, otherwise one that a rank has read in place of what was asked.

    Args:
        read: int64 (ranks, n), ``Batch.rows`` of each.
        asked: int64 (n,), what they were to read: ``Batch.wanted``, then what this returned the last time.
    """
    replacement = np.where(read != asked, read, np.iinfo(np.int64).max).min(axis=0)
    rows: Rows = np.where((read == read[0]).all(axis=0), read[0], replacement)
    return rows
