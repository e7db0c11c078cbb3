"""A batch on its way to the device that trains: copied, made the model's input, and boxes of tiles made when asked for.

Boxes have the numbers of a crop of whole tiles, bit for bit: all that is done to a pixel is done to it alone.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.slides.geometry import TileBox
from pipelines.stream.augment import Draw
from pipelines.stream.batch import Batch, TileParts, shaped
from pipelines.stream.device_pixels import Extent, MadePart, PixelMaker, Stored, TileBytes, box_inside


class BoxMaker:
    """Makes microbatches of which nothing but labels is on the device."""

    def __init__(self, pixels: PixelMaker) -> None:
        self.device = pixels.device
        self._pixels = pixels

    def make(
        self, images: Stored | None, targets: Stored | None, samples: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> tuple[HostBoxes | None, HostBoxes | torch.Tensor | None]:
        """Return one microbatch, as ``PixelMaker.make`` does, of images and masks on the host; they are read for as
        long as boxes are asked for."""
        drawn = self._pixels.drawn(samples, rows)
        floats = functools.partial(self._pixels.floats, drawn=drawn)
        boxes = None if images is None else HostBoxes(TileBytes.of(images), drawn, self.device, floats)
        if isinstance(targets, torch.Tensor) and targets.ndim == 1:
            return boxes, targets.to(self.device, copy=True)
        return boxes, None if targets is None else HostBoxes(TileBytes.of(targets), drawn, self.device)


class HostBoxes:
    """Images float32 (m, 3, h, w), or masks uint8 (m, h, w), of tiles on the host, sent to the device by boxes.

    Args:
        floats: makes images of the bytes on the device; None: they are masks.
    """

    def __init__(
        self,
        stored: TileBytes,
        drawn: Draw | None,
        device: torch.device,
        floats: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.shape: tuple[int, ...] = (len(stored.tiles), *((3,) if floats else ()), stored.height, stored.width)
        self.dtype = torch.float32 if floats else torch.uint8
        self.device = device
        self._stored, self._drawn, self._floats = stored, drawn, floats

    def box(self, rows: Extent, columns: Extent) -> torch.Tensor:
        """Return (m, ..., rows, columns) on the device; nothing else crosses to it.

        Raises:
            ValueError: they are not all inside the part that is stored.
        """
        # torch keeps pinned memory from being reused before the copy is done.
        box = box_inside(self._stored.part, rows, columns)
        cut = self._stored.turned(self._drawn, box, pinned=self.device.type == "cuda")
        sent = cut.to(self.device, non_blocking=True)
        return sent if self._floats is None else self._floats(sent)


Maker = PixelMaker | BoxMaker

Part = tuple[torch.Tensor | HostBoxes | MadePart | None, torch.Tensor | HostBoxes | MadePart | None]
"""Images and targets of a microbatch; None for what is stored of none of its tiles."""


class CopyStreams:
    """Streams that copy batches to a device and make microbatches there.

    Args:
        pixels: makes microbatches, on its device; one that makes boxes takes them from the host, and nothing ahead.
        ahead: they are made while others are computed.
        thread_context: entered by the thread that makes them on a CPU, around each.
    """

    def __init__(
        self, pixels: Maker, ahead: bool, thread_context: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self.device = pixels.device
        self.copying: torch.cuda.Stream | None = None
        self.making: torch.cuda.Stream | None = None
        self._given: torch.cuda.Event | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._pixels = pixels
        self._thread_context = thread_context
        if isinstance(pixels, BoxMaker):
            return
        if self.device.type == "cuda":
            self.copying = feed_stream(self.device, "copying")
        if ahead and self.copying is None:
            self._thread = ThreadPoolExecutor(1, "microbatch-maker")
        elif ahead:
            # Not the copying stream: the next microbatch would wait for the next batch to be copied.
            self.making = feed_stream(self.device, "making")
            self.making.wait_stream(torch.cuda.current_stream(self.device))  # for the normalisation's numbers

    def submit(self, make: Callable[[Maker], Part]) -> Future[Part]:
        """Return the microbatch that ``make`` gives, made by the thread where there is one, here and now elsewhere."""
        if self._thread is not None:
            return self._thread.submit(self._make_ahead, make)
        made: Future[Part] = Future()
        made.set_result(make(self._pixels))
        return made

    def await_computed(self) -> None:
        """Wait, if a stream makes microbatches, until the GPU has computed all but the last given: a host ahead of it
        would have more made, and each takes memory until it is computed."""
        if self.making is None:
            return
        if self._given is not None:
            self._given.synchronize()
        self._given = torch.cuda.current_stream(self.device).record_event()

    def close(self) -> None:
        """End the thread; what microbatches are made with may be freed from now on."""
        if self._thread is not None:
            self._thread.shutdown()
        if self.making is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.making)

    def _make_ahead(self, make: Callable[[Maker], Part]) -> Part:
        with self._thread_context():
            return make(self._pixels)


class DeviceBatch:
    """One batch on the device, uint8 still, or on the host for boxes of it, and its microbatches."""

    def __init__(self, lane: CopyStreams, batch: Batch, sizes: Sequence[int]) -> None:
        self.batch = batch
        self._lane = lane
        self._copied: torch.cuda.Event | None = None
        self._images, self._targets = torch.from_numpy(batch.images), torch.from_numpy(batch.targets)
        if lane.copying is not None and batch.size_of is None:
            with torch.cuda.stream(lane.copying):
                self._images = self._images.to(lane.device, non_blocking=True)
                self._targets = self._targets.to(lane.device, non_blocking=True)
            self._copied = lane.copying.record_event()
        self._begun: deque[tuple[Future[Part], torch.cuda.Event | None]] = deque()
        self._sizes, self._next = tuple(sizes), 0

    def cut(self, sizes: Sequence[int]) -> None:
        """Make microbatches of ``sizes`` tiles; drop those that were begun with other sizes."""
        if tuple(sizes) != self._sizes:
            self.cancel()
            self._sizes, self._next = tuple(sizes), 0

    def begin(self, count: int) -> int:
        """Begin microbatches until ``count`` are under way or none is left; return how many are missing."""
        while len(self._begun) < count and self._next < len(self._sizes):
            start = sum(self._sizes[: self._next])
            self._begun.append(self._begin(slice(start, start + self._sizes[self._next])))
            self._next += 1
        return count - len(self._begun)

    def take(self) -> Part:
        """Return the next microbatch, which was begun, once it is made; it is no longer held here."""
        future, made = self._begun.popleft()
        microbatch = future.result()
        if made is not None:
            computing = torch.cuda.current_stream(self._lane.device)
            computing.wait_event(made)
            for tensor in _made(microbatch):
                tensor.record_stream(computing)  # made on the other: not to be reused before this one is done
        return microbatch

    def held(self) -> Iterator[torch.Tensor]:
        """Yield images and targets made and not taken; those being made are waited for."""
        for future, _ in self._begun:
            yield from _made(future.result())

    def cancel(self) -> None:
        """Give up what is begun; nothing reads the batch for it any more."""
        wait([future for future, _ in self._begun if not future.cancel()])
        self._begun.clear()

    def wait_h2d(self) -> None:
        """Return once the batch in host memory is copied."""
        if self._copied is not None:
            self._copied.synchronize()

    def wait_on_stream(self) -> None:
        """Let the computation use what is copied, unless another stream makes microbatches of it."""
        if self._copied is not None and self._lane.making is None:
            self._wait_on(torch.cuda.current_stream(self._lane.device))

    def _begin(self, tiles: slice) -> tuple[Future[Part], torch.cuda.Event | None]:
        def make(pixels: Maker) -> Part:
            about = self.batch.samples[tiles], self.batch.known_rows[tiles]
            if self.batch.size_of is not None:
                device = torch.device("cpu") if isinstance(pixels, BoxMaker) else pixels.device
                return pixels.make(*self._of_own_size(tiles, device), *about)
            images = _of_part(self._images, self.batch.has_image, tiles)
            targets = _of_part(self._targets, self.batch.has_target, tiles)
            if self.batch.parts is None:
                return pixels.make(images, targets, *about)
            return pixels.make(*_in_parts(images, targets, self.batch.parts, about[0]), *about)

        making = self._lane.making
        if making is None or self._copied is None:
            return self._lane.submit(make), None
        self._wait_on(making)
        with torch.cuda.stream(making):
            return self._lane.submit(make), making.record_event()

    def _of_own_size(self, tiles: slice, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Stored bytes of the one tile of a microbatch on ``device``, where tiles differ in size."""
        batch, k = self.batch, tiles.start
        assert tiles.stop == k + 1, "tiles of different sizes are computed one at a time"
        images = targets = None
        if batch.has_image[k]:
            images = torch.from_numpy(shaped(batch.image(k), (*batch.sides(k), 3)))[None].to(device)
        if batch.has_target[k]:
            target = batch.target(k)
            targets = torch.from_numpy(shaped(target, batch.sides(k)) if target.ndim else target)[None].to(device)
        return images, targets

    def _wait_on(self, stream: torch.cuda.Stream) -> None:
        """Let ``stream`` use what the copying stream has brought."""
        assert self._copied is not None
        stream.wait_event(self._copied)
        for tensor in (self._images, self._targets):
            tensor.record_stream(stream)  # of the copying stream's memory: not to be reused before this one is done


@functools.cache
def feed_stream(device: torch.device, use: Literal["copying", "making"]) -> torch.cuda.Stream:
    """Return the stream of ``device`` for one use by all feeds of this process, one after the other.

    torch hands out 32 streams, to NCCL as well: with new ones for each validation, a feed would come to share a
    stream with a receive, and wait for it.
    """
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream


def _made(microbatch: Part) -> Iterator[torch.Tensor]:
    """Yield the tensors of a microbatch."""
    for value in microbatch:
        if isinstance(value, MadePart):
            yield value.made
        elif isinstance(value, torch.Tensor):
            yield value


def _of_part(stored: torch.Tensor, has: NDArray[np.bool_], tiles: slice) -> torch.Tensor | None:
    """Stored bytes of ``tiles`` of a batch: of all of them, or None."""
    count = int(np.count_nonzero(has[tiles]))
    assert count in (0, tiles.stop - tiles.start), "a microbatch is wanted as a whole"
    start = int(np.count_nonzero(has[: tiles.start]))
    return stored[start : start + count] if count else None


def _in_parts(
    images: torch.Tensor | None, targets: torch.Tensor | None, parts: TileParts, samples: NDArray[np.int64]
) -> tuple[TileBytes | None, Stored | None]:
    """Lines of a microbatch as the parts of tiles that they hold; classes stay as they are."""

    def stored(lines: torch.Tensor, box: TileBox, channels: tuple[int, ...]) -> TileBytes:
        boxes = [parts.stored(box, int(sample)) for sample in samples]
        pieces = [line.view(box.height, box.width, *channels) for line, box in zip(lines, boxes, strict=True)]
        return TileBytes(pieces, parts.height, parts.width, box, boxes)

    pixels = None if images is None else stored(images, parts.images, (3,))
    if targets is None or targets.ndim == 1:
        return pixels, targets
    return pixels, stored(targets, parts.targets, ())
