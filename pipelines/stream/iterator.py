"""The iterator over a ``TileStream``: the one thing on the data side that has state, and that state is one number.

Takes the stream's description; gives batches in order, read ahead by threads. ``get_state`` after k batches, handed to
``set_state`` of a new iterator, on any number of ranks and threads, gives exactly the batches that were left.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.slide import Pixels, SlideError
from pipelines.stream.batch import Batch, BufferPool
from pipelines.stream.cpu_augment import CpuAugment
from pipelines.stream.order import Rows
from pipelines.stream.prefetch import BuffersHeldError, Readahead, Wanted
from pipelines.stream.read import UNREAD, FaultLog, Read
from pipelines.stream.target import Labels, Target

if TYPE_CHECKING:
    from pipelines.stream.stream import TileStream


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
        augment = CpuAugment(stream.augmentation, stream.seed) if stream.augmentation.augment == "cpu" else None
        self._filler = _Filler(stream.reading, target, augment, FaultLog(stream.reading.on_fault))
        tile = stream.tiles.settings.tile
        self._buffers = BufferPool(
            (len(stream.image_rows), tile, tile, 3),
            (len(stream.target_rows), *target.shape(tile)),
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

    def follow(self, batch: Batch, rows: Rows) -> bool:
        """Make the targets of ``batch`` those of the tiles whose pixels were read, on whatever rank.

        Args:
            rows: int64 (n,), rows of the table that were read for ``batch.samples``; ``UNREAD`` where there is none.

        Returns:
            whether any target had to be filled again, because its tile was replaced.

        Raises:
            SlideError: the target of a row cannot be read, and unreadable tiles are replaced.
        """
        late = np.flatnonzero(batch.has_target & (rows != UNREAD) & (batch.rows != rows)).tolist()
        batch.rows[...] = rows
        for position in late:
            sample, row = int(batch.samples[position]), int(rows[position])
            batch.rows[position] = self._filler.follow(sample, row, batch.target(position))
        return bool(late)

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
            plan = _Plan(self.stream, self._batch)
            self._readahead = Readahead(self.stream.threads, self._buffers, plan.next, self._filler.fill)
            # Neither the threads nor `close` know this iterator, so they end with it, and at exit at the latest.
            self._stop = weakref.finalize(self, self._readahead.close)
        return self._readahead

    def _halt(self) -> None:
        self._stop()
        self._readahead = None


@dataclass
class _Plan:
    """Cuts the endless sequence of epochs into this rank's part of global batches, from batch number ``batch`` on.

    Holds the description only: the iterator must not be kept alive by its threads.
    """

    stream: TileStream
    batch: int
    _known: dict[int, Rows] = field(default_factory=dict)

    def next(self) -> Wanted | None:
        stream = self.stream
        first = self.batch * stream.global_batch
        rows = np.asarray(stream.rows, np.int64)
        if stream.epochs is not None:
            end = stream.epochs * stream.order.length
            if first >= end:
                return None
            rows = rows[first + rows < end]
        self.batch += 1
        samples = first + rows
        image, target = np.isin(rows, stream.image_rows), np.isin(rows, stream.target_rows)
        return Wanted(samples, self._rows_of(samples), first, image, target)

    def _rows_of(self, samples: Rows) -> Rows:
        order = self.stream.order
        epoch, position = np.divmod(samples, order.length)
        numbers = np.unique(epoch)
        self._known = {int(e): self._known[e] if e in self._known else order.epoch(int(e)) for e in numbers}
        rows = np.empty(len(samples), np.int64)
        for e, known in self._known.items():
            rows[epoch == e] = known[position[epoch == e]]
        return rows


@dataclass(frozen=True, eq=False)
class _Filler:
    """Reads and augments one sample. Knows nothing of the iterator: the reading threads must not keep it alive."""

    reading: Read
    target: Target
    augment: CpuAugment | None
    faults: FaultLog

    def fill(self, sample: int, row: int, image: Pixels | None, out: NDArray[Any] | None) -> int:
        """As ``prefetch.Fill``; a target without its pixels may stay ``UNREAD``: another rank decides what is read."""
        if image is None:
            assert out is not None
            try:
                return self.fill_target(sample, row, out)
            except (SlideError, OSError):
                return UNREAD
        with self._naming(sample, row):
            used = self.reading.fill(row, self.target, image, out, self.faults)
            if self.augment is not None:
                self.augment.apply(sample, image, out)
        return used

    def follow(self, sample: int, row: int, out: NDArray[Any]) -> int:
        """Write the target of ``row``, whose pixels another rank has read."""
        try:
            return self.fill_target(sample, row, out)
        except (SlideError, OSError) as error:
            if self.reading.replaces:
                raise
            self.faults(self.reading.tiles.slide_id(row), self.reading.tiles.region(row), error)
            return UNREAD

    def fill_target(self, sample: int, row: int, out: NDArray[Any]) -> int:
        """Write the target of exactly ``row``, varied as its pixels are."""
        with self._naming(sample, row):
            self.reading.fill_target(row, self.target, out)
            if self.augment is not None:
                self.augment.apply(sample, None, out)
        return row

    @contextlib.contextmanager
    def _naming(self, sample: int, row: int) -> Iterator[None]:
        tiles = self.reading.tiles
        try:
            yield
        except BaseException as error:
            error.add_note(f"while reading sample {sample}: slide {tiles.slide_id(row)}, {tiles.region(row)}")
            raise
