"""Iterator over a ``TileStream``, read ahead by threads. Its state is one number.

``get_state`` after k batches, handed to ``set_state`` of a new iterator on any number of ranks and threads, gives
exactly the remaining batches.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.slide import Closing, Pixels, SlideError
from pipelines.stream.batch import Batch, Buffer, BufferPool
from pipelines.stream.order import BatchRequest, BatchSampler, Rows
from pipelines.stream.read import MAX_FAULTS, SampleReader


class TileIterator(Closing):
    """Batches of a stream. One consumer; a context manager; ``close`` it, or let it go, and its threads end."""

    def __init__(
        self,
        source: BatchSampler,
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
                could not read ``MAX_FAULTS`` tiles in succession.
        """
        self._follows = self._follows + 1 if self._followed == batch.first_sample else 1
        self._followed = batch.first_sample
        if self._follows > MAX_FAULTS:
            raise SlideError(
                f"ranks that read parts of the same tiles could not read {MAX_FAULTS} tiles one after another, each "
                "some of them: check the disk, or take out the slides that are named as failed"
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
            else:
                batch.rows[position] = self._reader.fill(sample, row, batch.image(position), target)
        return bool(late)

    def get_state(self) -> dict[str, Any]:
        """Return where the iterator is, to be saved as JSON: batches given so far, and the stream's fingerprint."""
        return {"batch": self._batch, "stream": dict(self._fingerprint())}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from where ``get_state`` was called.

        Raises:
            ValueError: the state belongs to a stream with other settings; names them.
        """
        ours, saved = self._fingerprint(), state["stream"]
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


MAX_BATCHES_AHEAD = 64
"""More than these smooth no delay; without a limit small tiles would be read ahead by the hundred thousand."""

Fill = Callable[[int, int, Pixels | None, NDArray[Any] | None], int]
"""(sample, row, image, target) -> row used; None for what is not wanted here."""


class BuffersHeldError(RuntimeError):
    """The caller asks for a batch while it holds every buffer that the budget allows."""


@dataclass(eq=False)
class _Job:
    """A batch being filled: how many samples are missing, and the first fault by position in the batch."""

    batch: Batch
    buffer: Buffer
    pending: int
    fault: tuple[int, BaseException] | None = None


class Readahead:
    """The threads and the batches in flight. One consumer; ``Batch.release`` may come from any thread.

    Args:
        pool: where buffers come from; its budget bounds how far ahead is read.
        requests: the batches to come, in order. Asked by one thread at a time.
        fill: fills one sample; called by the reading threads.
    """

    def __init__(self, threads: int, pool: BufferPool, requests: Iterator[BatchRequest], fill: Fill) -> None:
        self._pool = pool
        self._requests = requests
        self._fill = fill
        self._jobs: deque[_Job] = deque()
        self._ended = False
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        # Daemons, stopped and joined by `close`, which the owner's finalizer calls: an iterator that was neither
        # closed nor exhausted must not keep the interpreter from ending.
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks, self._stop), name=f"tile-reader-{k}", daemon=True)
            for k in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def next(self) -> Batch | None:
        """Return the next batch, waited for; None at the end.

        Raises:
            BuffersHeldError: the caller holds every buffer the budget allows.
            Exception: what reading one of its samples raised; the first one in the batch, with a note that names it.
        """
        with self._changed:
            self._schedule()
            if not self._jobs:
                if self._ended:
                    return None
                raise BuffersHeldError(
                    f"the caller holds all {self._pool.made} batch buffers of {self._pool.buffer_bytes} bytes that "
                    f"max_bytes={self._pool.max_bytes} allows: call batch.release() when done with a batch"
                )
            job = self._jobs[0]
            self._changed.wait_for(lambda: not job.pending)
            self._jobs.popleft()
        if job.fault is not None:
            self._pool.give(job.buffer)
            raise job.fault[1]
        return job.batch

    def ready(self) -> bool:
        """Return whether ``next`` would give a batch without waiting."""
        with self._changed:
            self._schedule()
            return bool(self._jobs) and not self._jobs[0].pending and self._jobs[0].fault is None

    def close(self) -> None:
        """Stop the threads, after the samples they are at, and take back the buffers of batches not handed out."""
        with self._changed:
            self._ended = True
        self._stop.set()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        with self._changed:
            for job in self._jobs:
                self._pool.give(job.buffer)
            self._jobs.clear()

    def _schedule(self) -> None:
        """Start a batch for each free buffer. Holds the lock."""
        while not self._ended and len(self._jobs) < MAX_BATCHES_AHEAD:
            buffer = self._pool.take()
            if buffer is None:
                return
            request = next(self._requests, None)
            if request is None:
                self._pool.give(buffer)
                self._ended = True
                return
            batch = Batch(
                buffer[0][: np.count_nonzero(request.image)],
                buffer[1][: np.count_nonzero(request.target)],
                request.rows.copy(),
                request.samples,
                request.first_sample,
                cache(partial(self._released, buffer)),
                request.image,
                request.target,
                request.rows,
                self._pool.size_of,
                self._pool.parts,
            )
            read = np.flatnonzero(request.image | request.target).tolist()
            job = _Job(batch, buffer, len(read))
            self._jobs.append(job)
            for position in read:
                self._tasks.put(partial(self._read, job, position))

    def _read(self, job: _Job, position: int) -> None:
        """Fill one sample of a batch; in a reading thread."""
        batch, fault = job.batch, None
        sample, row = int(batch.samples[position]), int(batch.rows[position])
        try:
            image = batch.image(position) if batch.has_image[position] else None
            target = batch.target(position) if batch.has_target[position] else None
            batch.rows[position] = self._fill(sample, row, image, target)
        except BaseException as error:
            fault = error
        with self._changed:
            if fault is not None and (job.fault is None or position < job.fault[0]):
                job.fault = (position, fault)
            job.pending -= 1
            if not job.pending:
                self._changed.notify_all()

    def _released(self, buffer: Buffer) -> None:
        self._pool.give(buffer)
        with self._changed:
            self._schedule()


def _work(tasks: queue.SimpleQueue[Callable[[], None] | None], stop: threading.Event) -> None:
    """A reading thread."""
    while (task := tasks.get()) is not None and not stop.is_set():
        task()
