"""The iterator over a ``TileStream``: the one thing on the data side that has state, and that state is one number.

Takes the stream's description; gives batches in order, read ahead by threads. ``get_state`` after k batches, handed to
``set_state`` of a new iterator, on any number of ranks and threads, gives exactly the batches that were left.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.nodes.augment import CpuAugment
from pipelines.nodes.batch import Batch, BufferPool
from pipelines.nodes.order import Order, Rows
from pipelines.nodes.prefetch import BuffersHeldError, Fill, Readahead, Wanted
from pipelines.nodes.read import FaultLog, Read
from pipelines.nodes.target import Labels, Target
from pipelines.slide import Pixels

if TYPE_CHECKING:
    from pipelines.stream import TileStream


class TileIterator:
    """Batches of a stream. One consumer; a context manager; ``close`` it, or let it go, and its threads end.

    Attributes:
        stream: what is read.
        wait_s: seconds spent in ``next`` so far, waiting for batches.
    """

    def __init__(self, stream: TileStream) -> None:
        if stream.reading is None:
            raise ValueError("the stream reads from no slides: add .read(pool) to it")
        self.stream = stream
        self.wait_s = 0.0
        self._batch = 0
        target: Target = stream.target or Labels(np.broadcast_to(np.int64(-1), len(stream.tiles)))
        self._fill = _filler(stream, stream.reading, target, FaultLog(stream.reading.on_fault))
        tile, count = stream.tiles.settings.tile, len(stream.rows)
        self._buffers = BufferPool(
            (count, tile, tile, 3),
            (count, *target.shape(tile)),
            target.dtype,
            stream.max_bytes,
            stream.allocate,
        )
        self._readahead: Readahead | None = None
        self._stop: Callable[[], object] = lambda: None
        self._closed = False

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
        start = time.perf_counter()
        try:
            batch = self._running().next()
        except BuffersHeldError:
            raise
        except BaseException:
            self.close()
            raise
        finally:
            self.wait_s += time.perf_counter() - start
        if batch is None:
            self.close()
            raise StopIteration
        self._batch += 1
        return batch

    def ready(self) -> bool:
        """Whether the next batch could be had without waiting."""
        return not self._closed and self._running().ready()

    def get_state(self) -> dict[str, Any]:
        """Where the iterator is, to be saved as JSON: batches given so far, and the stream's fingerprint."""
        return {"batch": self._batch, "stream": dict(self.stream.fingerprint)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from where ``get_state`` was called.

        Raises:
            ValueError: the state belongs to a stream with other settings; names them.
        """
        saved, ours = state["stream"], self.stream.fingerprint
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
            plan = _Plan(self.stream.order, self.stream.global_batch, self.stream.rows, self.stream.epochs, self._batch)
            self._readahead = Readahead(self.stream.threads, self._buffers, plan.next, self._fill)
            # Neither the threads nor `close` know this iterator, so they end with it, and at exit at the latest.
            self._stop = weakref.finalize(self, self._readahead.close)
        return self._readahead

    def _halt(self) -> None:
        self._stop()
        self._readahead = None


@dataclass
class _Plan:
    """Cuts the endless sequence of epochs into this rank's part of global batches, from batch number ``batch`` on."""

    order: Order
    global_batch: int
    shard: range
    epochs: int | None
    batch: int
    _known: dict[int, Rows] = field(default_factory=dict)

    def next(self) -> Wanted | None:
        first = self.batch * self.global_batch
        samples = first + np.asarray(self.shard, np.int64)
        if self.epochs is not None:
            end = self.epochs * self.order.length
            if first >= end:
                return None
            samples = samples[samples < end]
        self.batch += 1
        return Wanted(samples, self._rows_of(samples), first)

    def _rows_of(self, samples: Rows) -> Rows:
        epoch, position = np.divmod(samples, self.order.length)
        numbers = np.unique(epoch)
        self._known = {int(e): self._known[e] if e in self._known else self.order.epoch(int(e)) for e in numbers}
        rows = np.empty(len(samples), np.int64)
        for e, known in self._known.items():
            rows[epoch == e] = known[position[epoch == e]]
        return rows


def _filler(stream: TileStream, reading: Read, target: Target, faults: FaultLog) -> Fill:
    """Reads and augments one sample. Not a method: the reading threads must not keep the iterator alive."""
    augment = CpuAugment(stream.augmentation, stream.seed) if stream.augmentation.augment == "cpu" else None

    def fill(sample: int, row: int, image: Pixels, out: NDArray[Any]) -> int:
        try:
            used = reading.fill(row, target, image, out, faults)
            if augment is not None:
                augment.apply(sample, image, out)
        except BaseException as error:
            tiles = reading.tiles
            error.add_note(f"while reading sample {sample}: slide {tiles.slide_id(row)}, {tiles.region(row)}")
            raise
        return used

    return fill
