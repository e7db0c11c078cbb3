"""From uint8 batches to float tensors on the device that trains. The only module of the data side that knows torch.

Takes a ``Batch``; gives its microbatches, float32 (m, 3, h, w), augmented and normalised on the device. Only one
microbatch is float at a time. On CUDA, tiles cross the bus as uint8 from pinned memory on a stream of their own, the
next batch while this one is computed. Stain jitter as ``stain.py`` (Tellez et al. 2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from pipelines.augment import AugmentSettings, draw
from pipelines.iterator import TileIterator
from pipelines.nodes.batch import Batch
from pipelines.nodes.order import Rows

NORMALISATION = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "he": ((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517)),
}
"""Mean and standard deviation of R, G, B, 0 to 1. imagenet: torchvision's, for weights trained with them; he: of H&E
tiles, as the model card of H-optimus-0 (Bioptimus, 2024) gives them."""


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


class DeviceFeed:
    """Brings batches to a device and makes the model's input of them there.

    Args:
        device: where the first layer runs.
        augment: applied here when it says "device".
        seed: of the run; what is done to a sample follows from it and the sample's number alone.
        normalisation: which mean and standard deviation, a key of ``NORMALISATION``.
        channels_last: memory format of the images, what convolutions are usually fastest with.
    """

    def __init__(
        self,
        device: torch.device,
        augment: AugmentSettings,
        *,
        seed: int,
        normalisation: Literal["imagenet", "he"] = "imagenet",
        channels_last: bool = True,
    ) -> None:
        self.device = device
        self._augment = augment
        self._seed = seed
        self._channels_last = channels_last
        mean, std = (torch.tensor(v, device=device).view(3, 1, 1) for v in NORMALISATION[normalisation])
        self._scale, self._offset = 1 / (255 * std), -mean / std
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._early: _Sent | None = None
        self._ahead: AheadIterator | None = None

    def ahead_of(self, source: TileIterator) -> AheadIterator:
        """Batches of ``source``, each on its way to the device while the one before is computed.

        ``microbatches`` sends the next batch on, as soon as it is read, between two microbatches.
        """
        self._ahead = AheadIterator(self, source)
        return self._ahead

    def send(self, batch: Batch) -> None:
        """Begin to copy a batch to the device before its ``microbatches`` are asked for."""
        self._early = self._copy(batch)

    def forget(self) -> None:
        """Wait for the copy that ``send`` began, and drop it."""
        if self._early is not None and self._early.copied is not None:
            self._early.copied.synchronize()
        self._early = None

    def microbatches(
        self, batch: Batch, sizes: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """The batch in parts, made one at a time, when asked for.

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
        if self._early is not None and self._early.batch is batch:
            sent, self._early = self._early, None
        else:
            sent = self._copy(batch)
        if sent.copied is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_event(sent.copied)
            for tensor in (sent.images, sent.targets):
                tensor.record_stream(computing)  # made on the side stream: not to be reused before this one is done
        start = 0
        for size in sizes:
            if self._ahead is not None:
                self._ahead.look()
            yield self._make(sent, slice(start, start + size))
            start += size
        if sent.copied is not None:
            sent.copied.synchronize()  # the host buffer is free from here on

    def _copy(self, batch: Batch) -> _Sent:
        images, targets = torch.from_numpy(batch.images), torch.from_numpy(batch.targets)
        if self._side is None:
            return _Sent(batch, images, targets, None)
        with torch.cuda.stream(self._side):
            images = images.to(self.device, non_blocking=True)
            targets = targets.to(self.device, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._side)
        return _Sent(batch, images, targets, copied)

    def _make(self, sent: _Sent, part: slice) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        images = _of_part(sent.images, sent.batch.has_image, part)
        targets = _of_part(sent.targets, sent.batch.has_target, part)
        if self._augment.augment != "device":
            # the batch's own memory may be released before the targets are used
            return (
                None if images is None else self._normalised(self._planes(images)),
                None if targets is None else targets.clone(),
            )
        drawn = draw(self._augment, self._seed, sent.batch.samples[part])
        orientation = list(zip(drawn.quarter_turns.tolist(), drawn.flip.tolist(), strict=True))
        if targets is not None:
            targets = _oriented(targets, orientation) if targets.ndim > 1 else targets.clone()
        if images is None:
            return None, targets
        pixels = self._planes(_oriented(images, orientation))
        if drawn.matrix is not None and drawn.shift is not None:
            _jitter(pixels, self._to_device(drawn.matrix), self._to_device(drawn.shift))
        return self._normalised(pixels), targets

    def _planes(self, images: torch.Tensor) -> torch.Tensor:
        """uint8 (m, h, w, 3) as float32 (m, 3, h, w), 0 to 255; new memory."""
        layout = torch.channels_last if self._channels_last else torch.contiguous_format
        return images.permute(0, 3, 1, 2).to(torch.float32, memory_format=layout)

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.mul_(self._scale).add_(self._offset)

    def _to_device(self, array: NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)


class AheadIterator:
    """A ``TileIterator`` that hands the next batch to a feed early; all else is the source's."""

    def __init__(self, feed: DeviceFeed, source: TileIterator) -> None:
        self._feed = feed
        self._source = source
        self._next: Batch | None = None

    @property
    def wait_s(self) -> float:
        return self._source.wait_s

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch, self._next = self._next, None
        return next(self._source) if batch is None else batch

    def look(self) -> None:
        """Send the next batch when it can be had without waiting and is not on its way yet."""
        if self._next is None and self._source.ready():
            self._next = next(self._source)
            self._feed.send(self._next)

    def follow(self, batch: Batch, rows: Rows) -> None:
        """As of ``TileIterator``, before the ``microbatches`` of ``batch`` are asked for."""
        if self._source.follow(batch, rows):
            self._feed.forget()  # the copy of this batch that was sent early has the targets as they were

    def get_state(self) -> dict[str, Any]:
        """As of ``TileIterator``: a batch that was sent early but not asked for yet does not count as given."""
        state = self._source.get_state()
        return state if self._next is None else {**state, "batch": state["batch"] - 1}

    def set_state(self, state: dict[str, Any]) -> None:
        self._drop()
        self._source.set_state(state)

    def close(self) -> None:
        self._drop()
        self._source.close()

    def _drop(self) -> None:
        if self._next is not None:
            self._feed.forget()
            self._next.release()
            self._next = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _of_part(stored: torch.Tensor, has: NDArray[np.bool_], part: slice) -> torch.Tensor | None:
    """What is stored of the tiles ``part`` of a batch: all or, None, nothing."""
    count = int(np.count_nonzero(has[part]))
    assert count in (0, part.stop - part.start), "a microbatch is wanted as a whole"
    start = int(np.count_nonzero(has[: part.start]))
    return stored[start : start + count] if count else None


def _oriented(images: torch.Tensor, orientation: Sequence[tuple[int, bool]]) -> torch.Tensor:
    """Turn counter-clockwise, then flip, each of uint8 (m, h, h, ...); quarter turns of oblong tiles become halves."""
    turned = torch.empty_like(images)
    for out, image, (turns, flip) in zip(turned, images, orientation, strict=True):
        whole = torch.rot90(image, turns, (0, 1))
        out.copy_(whole.flip(1) if flip else whole)
    return turned


def _jitter(pixels: torch.Tensor, matrix: torch.Tensor, shift: torch.Tensor) -> None:
    """Jitter stains in place: float32 (m, 3, h, w), 0 to 255, with (m, 3, 3) and (m, 3) of ``stain.jitter``.

    Plane by plane, not as a matrix product, whose rounding depends on the size of the microbatch.
    """
    density = pixels.add_(1).div_(256).log_().neg_()
    planes = []
    for k in range(3):
        plane = shift[:, k, None, None].expand_as(density[:, 0]).clone()
        for j in range(3):
            plane.addcmul_(density[:, j], matrix[:, j, k, None, None])
        planes.append(plane)
    for k, plane in enumerate(planes):
        pixels[:, k] = plane.neg_().exp_().mul_(256).sub_(1).clamp_(0, 255)
