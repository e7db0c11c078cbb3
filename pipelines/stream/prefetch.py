"""Reading ahead: threads fill batches, bounded in bytes, handed out in order.

Takes what each batch consists of and a function that fills one sample; gives whole batches. Samples of several batches
are in flight at once, so that one slow tile holds up nothing but its own batch. Threads, not processes, because every
decoder releases the GIL and a thread writes into the batch itself.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.slide import Pixels
from pipelines.stream.batch import Batch, Buffer, BufferPool
from pipelines.stream.order import BatchRequest

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
        threads: how many fill.
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
        """Return whether ``next`` would give a batch at once."""
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
        """Start as many batches as there are buffers for. Holds the lock."""
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
                buffer.images[: np.count_nonzero(request.image)],
                buffer.targets[: np.count_nonzero(request.target)],
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
