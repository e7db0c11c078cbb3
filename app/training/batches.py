"""Which tiles a rank reads: pixels where they are fed to the model, targets where they are held against outputs.

Takes what the engine wants of each microbatch; gives the stream of this rank's tiles and its microbatches. Which tile
replaces one that cannot be read follows from the files, and the rank that reads the pixels finds out. Ranks that have
only targets are told, in the exchange that ends each step, that a tile of the next batch is replaced; only then, and
where the next batch was not read in time, do the ranks exchange row numbers before a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from parallel.comm.communicator import Communicator, agree
from parallel.engine.step import Microbatch, Wants
from pipelines.stream.batch import Batch
from pipelines.stream.device import DeviceFeed
from pipelines.stream.device_batch import Part
from pipelines.stream.iterator import TileIterator
from pipelines.stream.stream import TileStream


@dataclass(frozen=True, eq=False)
class RankReading:
    """This rank's part of every global batch. Every rank makes its own at the same time.

    Attributes:
        ranges: tiles of the global batch in each microbatch of the rank's group.
        wants: what the rank needs of each of them.
        apart: on some rank, targets are had without the pixels.
        counted: the pixels of each tile are read on one rank that is, and maybe on others.
    """

    communicator: Communicator
    batch: int
    ranges: tuple[range, ...]
    wants: tuple[Wants, ...]
    apart: bool
    counted: bool = True

    @classmethod
    def of(
        cls,
        communicator: Communicator,
        batch: int,
        ranges: Sequence[range],
        wants: Sequence[Wants],
        counted: bool = True,
    ) -> RankReading:
        """Collective: finds out whether any rank has targets without pixels.

        Args:
            batch: tiles of a global batch.
            counted: no other rank whose pixels count reads the same.
        """
        apart = agree(communicator, any(want.targets and not want.images for want in wants))
        return cls(communicator, batch, tuple(ranges), tuple(wants), apart, counted)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tiles of each of the microbatches."""
        return tuple(map(len, self.ranges))

    def sharded(self, stream: TileStream) -> TileStream:
        """``stream`` in global batches, of which this rank reads its part."""
        rows = range(self.ranges[0].start, self.ranges[-1].stop)
        images, targets = (
            [row for tiles, want in zip(self.ranges, self.wants, strict=True) if want[k] for row in tiles]
            for k in range(2)
        )
        return stream.batch(self.batch).shard(rows, images, targets)

    def unsettled(self, feed: DeviceFeed) -> bool:
        """Return whether the ranks have to ``settle`` the next batch: a tile of it is replaced, or may yet be."""
        return self.apart and not feed.next_as_wanted()

    def settle(self, tiles: TileIterator, batch: Batch) -> bool:
        """Bring the targets in ``batch``, of ``tiles``, to the tiles whose pixels were read. Collective.

        Returns:
            whether a target changed.

        Raises:
            SlideError, OSError: a target cannot be read.
        """
        if not self.apart:
            return False
        read = torch.zeros(self.batch, dtype=torch.int64)
        places = torch.from_numpy(batch.samples - batch.first_sample)
        here = torch.from_numpy(batch.has_image) & self.counted
        read[places[here]] = torch.from_numpy(batch.rows)[here]
        self.communicator.all_reduce(read)  # the pixels of each tile are read on one of them that counts
        return tiles.follow(batch, read[places].numpy())


def microbatches_of(feed: DeviceFeed, batch: Batch, sizes: Sequence[int]) -> Iterator[Microbatch]:
    """``batch`` in parts of ``sizes`` tiles, made on the device one at a time, and held by nobody here."""

    def made(size: int, first: int, part: Part) -> Microbatch:
        return Microbatch(*part, (size, 3, *batch.sides(first)))

    return map(made, sizes, itertools.accumulate(sizes, initial=0), feed.microbatches(batch, sizes))


def sizes_of_part(batch: Batch, largest: int) -> list[int]:
    """Microbatches of up to ``largest`` tiles for a batch that may be short, at the end of a finite stream."""
    return [len(part) for part in np.split(batch.samples, range(largest, len(batch), largest)) if len(part)]
