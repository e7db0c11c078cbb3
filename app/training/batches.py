"""Which tiles a rank reads: pixels where they are fed to the model, targets where the loss is computed.

Takes what the engine wants of each microbatch; returns the stream of this rank's tiles and its microbatches. Which tile
replaces one that cannot be read follows from the files, and the rank that reads the pixels finds out. The exchange
that ends each step says whether a tile of the next batch is replaced; only then, and where the next batch was not read
in time, the ranks exchange row numbers before a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from app.settings.run import RunConfig
from app.training.dataset import Dataset
from parallel.comm.communicator import Communicator, agree
from parallel.engine.step import Microbatch, NeededInputs, TrainingEngine
from pipelines.labels.annotations import SlideAnnotations
from pipelines.slides.geometry import TileBox
from pipelines.stream.batch import Batch
from pipelines.stream.device import DevicePrefetcher
from pipelines.stream.device_batch import Part
from pipelines.stream.iterator import TileIterator, rows_to_follow
from pipelines.stream.stream import TileStream


@dataclass(eq=False)
class RankReading:
    """This rank's part of every global batch. Every rank makes its own at the same time.

    Attributes:
        ranges: tiles of the global batch in each microbatch of the rank's group.
        wants: what the rank needs of each of them.
        apart: on some rank, targets are had without the pixels, or parts of both.
        part: of tiles and of masks that are read here; None: all.
        samples: takes the number of tiles of a microbatch, returns those that are read here.
    """

    communicator: Communicator
    batch: int
    ranges: Sequence[range]
    wants: Sequence[NeededInputs]
    part: tuple[TileBox, TileBox] | None = None
    samples: Callable[[int], range] = range

    def __post_init__(self) -> None:
        """Collective: find out whether any rank has targets without pixels."""
        apart = self.part is not None or any(want.targets and not want.images for want in self.wants)
        self.apart = agree(self.communicator, apart)

    @property
    def read_ranges(self) -> tuple[range, ...]:
        """Tiles of each of the microbatches that are read here."""
        return tuple(tiles[own.start : own.stop] for tiles in self.ranges for own in (self.samples(len(tiles)),))

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(map(len, self.read_ranges))

    @property
    def counts(self) -> tuple[int, ...]:
        """Tiles of each of the microbatches, on whatever rank they are read."""
        return tuple(map(len, self.ranges))

    def sharded(self, stream: TileStream) -> TileStream:
        """``stream`` in global batches, of which this rank reads its part."""
        rows = tuple(itertools.chain(*self.read_ranges))
        images, targets = (
            [row for tiles, want in zip(self.read_ranges, self.wants, strict=True) if want[k] for row in tiles]
            for k in range(2)
        )
        stream = stream.batch(self.batch).shard(rows, images, targets)
        return stream if self.part is None else stream.part(*self.part)

    def needs_sync(self, feed: DevicePrefetcher) -> bool:
        """Return whether the ranks have to ``settle`` the next batch: a tile of it is replaced, or may yet be."""
        return self.apart and not feed.next_as_wanted()

    def settle(self, tiles: TileIterator, batch: Batch) -> bool:
        """Bring what ``batch``, of ``tiles``, has to the tiles whose pixels were read, on whatever rank. Collective.

        Ranks that read parts of the same tiles may each find theirs damaged: they go on until all have read the same.

        Returns:
            whether anything changed.

        Raises:
            SlideError, OSError: what is to be read cannot be.
        """
        if not self.apart:
            return False
        places = batch.samples - batch.first_sample
        asked, changed = np.zeros(self.batch, dtype=np.int64), False
        asked[places] = batch.wanted
        while True:
            read = self._rows_of_readers(batch, places)
            rows = rows_to_follow(read, asked)
            changed |= tiles.follow(batch, rows[places])
            if (read == read[0]).all():
                return changed
            asked = rows

    def _rows_of_readers(self, batch: Batch, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """(ranks, tiles) rows that each rank has read the pixels of; of a rank that reads none, those of another."""
        own = torch.zeros((2, self.batch), dtype=torch.int64)
        here = batch.has_image
        own[0, torch.from_numpy(places[here])] = 1
        own[1, torch.from_numpy(places[here])] = torch.from_numpy(batch.rows[here])
        reads, rows = self.communicator.all_gather(own).numpy().swapaxes(0, 1)
        first = rows[reads.argmax(axis=0), np.arange(self.batch)]
        found: NDArray[np.int64] = np.where(reads > 0, rows, first)
        return found


def microbatches_of(
    feed: DevicePrefetcher, batch: Batch, sizes: Sequence[int], counts: Sequence[int] | None = None
) -> Iterator[Microbatch]:
    """Return ``batch`` in parts of ``sizes`` tiles, made on the device one at a time, and not held here.

    Args:
        counts: tiles of each microbatch, where other ranks read further ones; None: ``sizes``.
    """

    def made(count: int, first: int, part: Part) -> Microbatch:
        return Microbatch(*part, (count, 3, *batch.sides(first)))

    return map(made, counts or sizes, itertools.accumulate(sizes, initial=0), feed.microbatches(batch, sizes))


def part_of(engine: TrainingEngine, shape: tuple[int, int, int, int]) -> tuple[TileBox, TileBox] | None:
    """Return the parts of every tile and mask that this rank reads, where it does not read all."""
    boxes = engine.parts(shape)
    if boxes == (None, None):
        return None
    whole = TileBox.full(*shape[2:])
    images, targets = (whole if box is None else TileBox(*box[0], *box[1]) for box in boxes)
    return images, targets


def sizes_of_part(batch: Batch, largest: int) -> list[int]:
    """Microbatches of up to ``largest`` tiles for a batch that may be short, at the end of a finite stream."""
    return [len(part) for part in np.split(batch.samples, range(largest, len(batch), largest)) if len(part)]


def tiles_in_order(
    config: RunConfig, dataset: Dataset, rows: NDArray[np.int64], epochs: int | None = None
) -> TileStream:
    """Return tiles ``rows`` of the dataset with their targets, in index order."""
    stream = TileStream.over(dataset.tiles.select(rows), seed=config.seed, epochs=epochs)
    if config.index.whole_pictures:
        stream = stream.crop(varied=False)
    if dataset.tile_labels is not None:
        return stream.label(dataset.tile_labels[rows])
    assert isinstance(dataset.truth, SlideAnnotations)
    return stream.mask(dataset.truth)
