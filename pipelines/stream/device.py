"""Float tensors on the device that trains from uint8 batches: the last link of the chain that feeds it.

Takes batches from a ``TileIterator``; gives them, and the microbatches of each, float32 (m, 3, h, w), augmented and
normalised on the device, when they are asked for, or so many ahead while others are computed: on CUDA on a stream of
its own, on a CPU by a thread of its own. On CUDA, tiles cross the bus as uint8 from pinned memory, the next batch while
this one is computed. With ``device_pixels`` all of the data side that knows torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.slides.slide import Closing
from pipelines.stream.batch import Batch
from pipelines.stream.device_batch import CopyStreams, DeviceBatch, Maker, Part


def allocate_pinned(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """Return an array in page-locked memory, from which copies to a CUDA device overlap the computation."""
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    array: NDArray[Any] = torch.empty(shape, dtype=kind, pin_memory=True).numpy()
    return array


class DevicePrefetcher(Closing):
    """Batches of a source, and their microbatches on a device. One consumer; a context manager.

    While the microbatches of a batch are asked for, the next batch is sent to the device as soon as it is read.

    Args:
        ready: says whether ``source`` gives the next one without waiting.
        pixels: makes microbatches, on its device; a ``BoxMaker`` leaves tiles on the host, for boxes of them.
        prefetch: microbatches made ahead of the one that was given last, those of the next batch among them once that
            has been sent. Each takes its float32 images on the device from then on, and as much again while its stains
            are jittered; its numbers are the same as without.
        thread_context: entered by the thread that makes microbatches ahead, around each, to count its memory.
    """

    def __init__(
        self,
        source: Iterator[Batch],
        ready: Callable[[], bool],
        pixels: Maker,
        *,
        prefetch: int = 0,
        thread_context: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._source = source
        self._ready = ready
        self._lane = CopyStreams(pixels, prefetch > 0, thread_context)
        self._prefetch = prefetch
        self._sizes: tuple[int, ...] = ()
        self._given: DeviceBatch | None = None  # its microbatches were not asked for yet
        self._next: DeviceBatch | None = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        """Return the next batch of the source."""
        self._forget_given()
        self._given, self._next = self._next, None
        return next(self._source) if self._given is None else self._given.batch

    def next_as_wanted(self) -> bool:
        """Return whether the next batch is read already, and no tile of it replaced or left out."""
        self._look()
        return self._next is not None and bool((self._next.batch.rows == self._next.batch.wanted).all())

    def invalidate(self, batch: Batch) -> None:
        """Forget what was made of ``batch`` before its targets changed."""
        if self._given is not None and self._given.batch is batch:
            self._forget_given()

    def held(self) -> Iterator[torch.Tensor]:
        """Yield, between two steps, the images and targets made ahead; those being made are waited for."""
        for sent in (self._given, self._next):
            if sent is not None:
                yield from sent.held()

    def microbatches(self, batch: Batch, sizes: Sequence[int]) -> Iterator[Part]:
        """Yield the batch in parts, made one at a time, when asked for or ``prefetch`` of them ahead.

        Args:
            batch: may be released once all parts were taken and, where they are boxes of it, used.
            sizes: tiles in each part; together the batch.

        Yields:
            images float32 (m, 3, h, w), and targets int64 (m,), or uint8 (m, h, w) with 255 for "ignore", whole or
            by boxes; None for what the batch has of none of the part's tiles.

        Raises:
            ValueError: ``sizes`` do not add up to the batch.
        """
        if sum(sizes) != len(batch):
            raise ValueError(f"microbatches of {list(sizes)} tiles do not make up a batch of {len(batch)}")
        self._sizes = tuple(sizes)
        sent, self._given = self._given, None
        if sent is None or sent.batch is not batch:
            sent = self._send(batch)
        sent.cut(sizes)
        sent.wait_on_stream()
        copied = False
        try:
            for number in range(len(sizes)):
                self._lane.await_computed()
                self._look()
                missing = sent.begin(1 + self._prefetch)
                if self._prefetch and self._next is not None:
                    self._next.begin(missing)
                if number == len(sizes) - 1:
                    sent.wait_h2d()  # the host buffer is free from here on
                    copied = True
                yield sent.take()
        finally:
            sent.cancel()  # of a step that was given up, or that other ranks computed the rest of
            if not copied:
                sent.wait_h2d()

    def close(self) -> None:
        """Wait for what is under way, and drop it."""
        self._forget_given()
        if self._next is not None:
            self._given, self._next = self._next, None
            unasked = self._given.batch
            self._forget_given()
            unasked.release()
        self._lane.close()

    def _forget_given(self) -> None:
        if self._given is not None:
            self._given.cancel()
            self._given.wait_h2d()
            self._given = None

    def _look(self) -> None:
        """Send the next batch when it can be had without waiting and is not on its way yet."""
        if self._next is None and self._ready():
            self._next = self._send(next(self._source))

    def _send(self, batch: Batch) -> DeviceBatch:
        """Begin to copy ``batch`` to the device; it is cut as the one before until other sizes are asked for."""
        return DeviceBatch(self._lane, batch, self._sizes if sum(self._sizes) == len(batch) else ())
