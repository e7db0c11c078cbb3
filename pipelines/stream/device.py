"""From uint8 batches to float tensors on the device that trains.

Takes a ``Batch``; gives its microbatches, float32 (m, 3, h, w), augmented and normalised on the device, each when it is
asked for, or so many ahead while others are computed: on CUDA on a stream of its own, on a CPU by a thread of its own.
On CUDA, tiles cross the bus as uint8 from pinned memory, the next batch while this one is computed. With
``device_pixels`` all of the data side that knows torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.stream.ahead import AheadIterator, MicrobatchQueue, OnThread, Pending, WhenAsked
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.batch import Batch
from pipelines.stream.device_pixels import Part, PixelMaker
from pipelines.stream.iterator import TileIterator


def allocate_pinned(shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
    """An array in page-locked memory, from which copies to a CUDA device run beside the computation."""
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    array: NDArray[Any] = torch.empty(shape, dtype=kind, pin_memory=True).numpy()
    return array


@dataclass(frozen=True, eq=False)
class _Sent:
    """A batch on the device, uint8 still; ``copied`` is when the copies on the side stream are done."""

    batch: Batch
    images: torch.Tensor
    targets: torch.Tensor
    copied: torch.cuda.Event | None


@dataclass(frozen=True, eq=False)
class _OnStream:
    """A part that a stream of its own makes; ``made`` is when it has."""

    part: Part
    made: torch.cuda.Event
    device: torch.device

    def take(self) -> Part:
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(self.made)
        for tensor in self.part:
            if tensor is not None:
                tensor.record_stream(computing)  # made on the other: not to be reused before this one is done
        return self.part

    def drop(self) -> None:
        """It reads what is on the device, not the batch, and its stream alone has used its memory."""


class DeviceFeed:
    """Brings batches to a device and makes the model's input of them there.

    Args:
        device: where the first layer runs.
        augment: applied here when it says "device".
        seed: of the run; what is done to a sample follows from it and the sample's number alone.
        normalisation: which mean and standard deviation, a key of ``NORMALISATION``.
        channels_last: memory format of the images, what convolutions are usually fastest with.
        prefetch: microbatches made ahead of the one that was given last, those of the next batch among them once that
            has been sent. Each takes its float32 images on the device from then on, and as much again while its stains
            are jittered; its numbers are the same as without.

    Attributes:
        beside: entered by the thread that makes microbatches ahead, around each: who counts memory by thread counts
            it there, too.
    """

    def __init__(
        self,
        device: torch.device,
        augment: AugmentSettings,
        *,
        seed: int,
        normalisation: Literal["imagenet", "he"] = "imagenet",
        channels_last: bool = True,
        prefetch: int = 0,
    ) -> None:
        self.device = device
        self.beside: Callable[[], AbstractContextManager[object]] = nullcontext
        self._pixels = PixelMaker(device, augment, seed, normalisation, channels_last)
        self._prefetch = prefetch
        self._side: torch.cuda.Stream | None = None
        self._making: torch.cuda.Stream | None = None
        self._thread: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        if prefetch and self._side is None:
            self._thread = ThreadPoolExecutor(1, "microbatch-maker")
        elif prefetch:
            # Not the side stream: the next microbatch would wait for the next batch to be copied.
            self._making = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._making.wait_stream(torch.cuda.current_stream(device))  # for the normalisation's numbers
        self._sizes: tuple[int, ...] = ()
        self._early: tuple[_Sent, MicrobatchQueue[Part]] | None = None
        self._look: Callable[[], None] = lambda: None

    def ahead_of(self, source: TileIterator) -> AheadIterator:
        """Batches of ``source``, each on its way to the device while the one before is computed.

        ``microbatches`` sends the next batch on, as soon as it is read, between two microbatches.
        """
        batches = AheadIterator(self, source)
        self._look = batches.look
        return batches

    def repeat(self, batch: Batch) -> None:
        """From now on ``batch`` is also the next one: as ``ahead_of``, fed from memory."""
        self.forget()

        def look() -> None:
            if self._early is None:
                self.send(batch)

        self._look = look

    def send(self, batch: Batch) -> None:
        """Begin to copy a batch to the device before its ``microbatches`` are asked for."""
        sent = self._copy(batch)
        # Cut as the one before until other sizes are asked for.
        self._early = sent, self._line(sent, self._sizes if sum(self._sizes) == len(batch) else ())

    def forget(self) -> None:
        """Wait for what ``send`` began, and drop it."""
        if self._early is not None:
            sent, line = self._early
            line.drop()
            if sent.copied is not None:
                sent.copied.synchronize()
        self._early = None

    def held(self) -> Iterator[torch.Tensor]:
        """Between two batches, images and targets that are made of the next one already; what is being made is waited
        for."""
        if self._early is not None:
            for part in self._early[1].made():
                yield from (tensor for tensor in part if tensor is not None)

    def microbatches(self, batch: Batch, sizes: Sequence[int]) -> Iterator[Part]:
        """The batch in parts, made one at a time, when asked for or ``prefetch`` of them ahead.

        Args:
            batch: may be released once all parts were taken.
            sizes: tiles in each part; together the batch.

        Yields:
            images float32 (m, 3, h, w), and targets int64 (m,), or uint8 (m, h, w) with 255 for "ignore"; None for
            what the batch has of none of the part's tiles.

        Raises:
            ValueError: ``sizes`` do not add up to the batch.
        """
        if sum(sizes) != len(batch):
            raise ValueError(f"microbatches of {list(sizes)} tiles do not make up a batch of {len(batch)}")
        sent, line = self._taken(batch, tuple(sizes))
        self._sizes = tuple(sizes)
        if sent.copied is not None and self._making is None:
            self._enter(sent, torch.cuda.current_stream(self.device))
        try:
            for number in range(len(sizes)):
                self._look()
                missing = 1 + self._prefetch - line.begin(1 + self._prefetch)
                if missing and self._prefetch and self._early is not None:
                    self._early[1].begin(missing)
                if number == len(sizes) - 1 and sent.copied is not None:
                    sent.copied.synchronize()  # the host buffer is free from here on
                yield line.give()
        finally:
            line.drop()  # of a step that was given up

    def _taken(self, batch: Batch, sizes: tuple[int, ...]) -> tuple[_Sent, MicrobatchQueue[Part]]:
        """``batch`` on its way: as it was sent early, or only now."""
        if self._early is None or self._early[0].batch is not batch:
            sent = self._copy(batch)
            return sent, self._line(sent, sizes)
        (sent, line), self._early = self._early, None
        if line.sizes != sizes:
            line.drop()
            line = self._line(sent, sizes)
        return sent, line

    def _line(self, sent: _Sent, sizes: Sequence[int]) -> MicrobatchQueue[Part]:
        return MicrobatchQueue(sizes, functools.partial(self._begin, sent))

    def _copy(self, batch: Batch) -> _Sent:
        images, targets = torch.from_numpy(batch.images), torch.from_numpy(batch.targets)
        if self._side is None:
            return _Sent(batch, images, targets, None)
        with torch.cuda.stream(self._side):
            images = images.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
        return _Sent(batch, images, targets, self._side.record_event())

    def _enter(self, sent: _Sent, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` use what the side stream has brought."""
        assert sent.copied is not None
        stream.wait_event(sent.copied)
        for tensor in (sent.images, sent.targets):
            tensor.record_stream(stream)  # of the side stream's memory: not to be reused before this one is done

    def _begin(self, sent: _Sent, part: slice) -> Pending[Part]:
        make = functools.partial(self._make, sent, part)
        if self._thread is not None:
            return OnThread(self._thread.submit(self._watched, make))
        if self._making is None:
            return WhenAsked(make)
        self._enter(sent, self._making)
        with torch.cuda.stream(self._making):
            made = make()
        return _OnStream(made, self._making.record_event(), self.device)

    def _watched(self, make: Callable[[], Part]) -> Part:
        with self.beside():
            return make()

    def _make(self, sent: _Sent, part: slice) -> Part:
        return self._pixels.make(
            _of_part(sent.images, sent.batch.has_image, part),
            _of_part(sent.targets, sent.batch.has_target, part),
            sent.batch.samples[part],
        )


def _of_part(stored: torch.Tensor, has: NDArray[np.bool_], part: slice) -> torch.Tensor | None:
    """What is stored of the tiles ``part`` of a batch: all or, None, nothing."""
    count = int(np.count_nonzero(has[part]))
    assert count in (0, part.stop - part.start), "a microbatch is wanted as a whole"
    start = int(np.count_nonzero(has[: part.start]))
    return stored[start : start + count] if count else None
