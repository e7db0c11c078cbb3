"""Batches from a table of tiles: an immutable description, and the iterator that alone holds state.

    stream = (TileStream.over(tiles, seed=0).shuffle(open_slides=16).class_balanced(class_of_tile).read(pool)
              .label(class_of_tile).augment(AugmentSettings()).batch(64).shard(range(0, 32)).prefetch(threads=4))
    for batch in iter(stream): ...; batch.release()

Sample i of the endless sequence of epochs is a function of (settings, seed, i), as in grain's MapDataset: the order is
the same whatever the number of ranks or threads, a rank reads only its rows of each global batch, and resume is one
number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import TileBox
from pipelines.stream.augment import NO_AUGMENTATION, AugmentSettings, CpuAugment
from pipelines.stream.batch import Allocate, BufferPool, Labels, Masks, Target, TileParts
from pipelines.stream.iterator import TileIterator
from pipelines.stream.order import Bags, Balance, BatchSampler, IndexOrder, Order, Rows, SlideShuffle, Weighted
from pipelines.stream.read import OnFault, PictureCrop, SampleReader

if TYPE_CHECKING:
    from pipelines.catalog.handles import SlidePool
    from pipelines.labels.annotations import SlideAnnotations
    from pipelines.tiles.tile_table import TileTable


@dataclass(frozen=True, eq=False)
class TileStream:
    """Tiles to read, their order, their batches: every method gives a new stream; only ``read`` is required.

    Start with ``TileStream.over``. Iterating opens nothing before the first batch is asked for.
    """

    tiles: TileTable
    seed: int
    epochs: int | None
    open_slides: int | None = None
    strata: NDArray[np.int64] | None = None
    weights: NDArray[np.float64] | None = None
    bag: int | None = None
    pool: SlidePool | None = None
    on_fault: OnFault | None = None
    replaces: bool = True
    target: Target | None = None
    augmentation: AugmentSettings = NO_AUGMENTATION
    cut: PictureCrop | None = None
    boxes: tuple[TileBox, TileBox] | None = None
    global_batch: int = 1
    rows: Sequence[int] = range(1)
    image_rows: Sequence[int] = (0,)
    target_rows: Sequence[int] = (0,)
    max_bytes: int = 1 << 30
    threads: int = 4
    allocate: Allocate = np.empty

    @classmethod
    def over(cls, tiles: TileTable, *, seed: int = 0, epochs: int | None = None) -> Self:
        """Return a stream of all tiles of a table, in index order.

        Args:
            tiles: at least one.
            seed: of everything random here, 0 to 2**32 - 1.
            epochs: how often to go through; endless by default, where a batch may reach over the end of an epoch. At
                the end of a finite stream the last global batch is shorter.
        """
        if not len(tiles):
            raise ValueError("a stream needs at least one tile; the table is empty: lower --min-tissue or --tile")
        if not 0 <= seed < 1 << 32:
            raise ValueError(f"seed is 0 to 2**32 - 1; got {seed}")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs is at least 1, or None for an endless stream; got {epochs}")
        return cls(tiles, seed, epochs)

    def shuffle(self, open_slides: int = 16) -> Self:
        """Shuffle slides, and the tiles of ``open_slides`` at a time; a pool of a few more slides than that reads
        each slide in one go. With ``balance`` the classes share the number, one slide each at least."""
        if open_slides < 1:
            raise ValueError(f"open_slides is at least 1; got {open_slides}")
        return replace(self, open_slides=open_slides)

    def class_balanced(self, class_of_tile: NDArray[np.int64]) -> Self:
        """Draw each class equally often per epoch.

        Args:
            class_of_tile: int64 (n,), class of every row of the table, at least 0.
        """
        if class_of_tile.shape != (len(self.tiles),) or class_of_tile.min() < 0:
            raise ValueError(
                f"balance needs a class >= 0 for each of {len(self.tiles)} tiles; got shape {class_of_tile.shape}, "
                f"smallest {class_of_tile.min() if class_of_tile.size else 'none'}: leave out tiles without a label"
            )
        return replace(self, strata=class_of_tile, weights=None)

    def weighted(self, weight_of_tile: NDArray[np.float64]) -> Self:
        """Draw each tile as often as its weight says, shuffled: one draw per epoch for each tile.

        Args:
            weight_of_tile: float64 (n,), of every row of the table, at least 0 and not all 0.
        """
        fits = weight_of_tile.shape == (len(self.tiles),) and np.isfinite(weight_of_tile).all()
        if not fits or weight_of_tile.min() < 0 or not weight_of_tile.sum() > 0:
            raise ValueError(
                f"a weight at least 0 for each of {len(self.tiles)} tiles, and not 0 for all; got shape "
                f"{weight_of_tile.shape}, sum {weight_of_tile.sum():g}"
            )
        return replace(self, weights=weight_of_tile, strata=None)

    def bags(self, size: int) -> Self:
        """Draw each slide once per epoch, ``size`` of its tiles one after the other. Targets are numbers of slides.
        They differ within a bag if its slide becomes unreadable, and tiles of another replace the rest."""
        if size < 1:
            raise ValueError(f"a bag has at least 1 tile; got {size}")
        return replace(self, bag=size)

    def read(self, pool: SlidePool, on_fault: OnFault | None = None, *, replaces: bool = True) -> Self:
        """Read from these slides; reading threads call ``on_fault(slide_id, region, error)`` each time a tile cannot be
        read or, with region None, a slide does not open.

        Args:
            replaces: another tile is read in place of each; otherwise it is blank, and ``UNREAD`` in ``Batch.rows``.
        """
        return replace(self, pool=pool, on_fault=on_fault, replaces=replaces)

    def label(self, class_of_tile: NDArray[np.int64]) -> Self:
        """Targets are classes: int64 (n,), one for every row of the table. Without any target they are -1."""
        if class_of_tile.shape != (len(self.tiles),):
            raise ValueError(f"one label for each of {len(self.tiles)} tiles; got shape {class_of_tile.shape}")
        return replace(self, target=Labels(class_of_tile))

    def mask(self, annotations: SlideAnnotations) -> Self:
        """Targets are masks, uint8 (h, w): a class per pixel, 255 for "ignore"."""
        return replace(self, target=Masks(annotations))

    def augment(self, settings: AugmentSettings) -> Self:
        """Vary the tiles. Mode "cpu" is done here; "device" by ``DevicePrefetcher``, which needs the same settings."""
        if faults := settings.validate():
            raise ValueError("; ".join(faults))
        return replace(self, augmentation=settings)

    def crop(self, *, varied: bool, flip: bool = True) -> Self:
        """Cut whole pictures to tiles: at random and, with ``flip``, flipped half of the time, or the middle."""
        return replace(self, cut=PictureCrop(self.tiles.settings.side, self.seed, varied, flip))

    def batch(self, global_batch: int) -> Self:
        """Tiles per batch over all ranks; a following ``shard`` says which of them are this rank's."""
        if global_batch < 1:
            raise ValueError(f"the global batch is at least 1 tile; got {global_batch}")
        return replace(self, global_batch=global_batch).shard(range(global_batch))

    def shard(
        self, rows: Sequence[int], images: Sequence[int] | None = None, targets: Sequence[int] | None = None
    ) -> Self:
        """Return a stream of the rows of each global batch that are this rank's; all by default.

        Args:
            rows: named in its batches.
            images: those of ``rows`` whose pixels it reads; None for all.
            targets: those whose targets it has. Where it does not read the pixels too, ``TileIterator.follow`` has to
                learn which tile another rank has read.
        """
        if not rows or min(rows) < 0 or max(rows) >= self.global_batch:
            raise ValueError(f"a shard is one or more rows out of range({self.global_batch}); got {rows}")
        images, targets = (rows if some is None else some for some in (images, targets))
        if not set(rows).issuperset({*images, *targets}):
            raise ValueError(f"images and targets are of rows in {rows}; got {list(images)} and {list(targets)}")
        return replace(self, rows=rows, image_rows=tuple(images), target_rows=tuple(targets))

    def part(self, images: TileBox, targets: TileBox | None = None) -> Self:
        """Return a stream of a box of every tile, for one rank of several that share each: equal, px for px, to the
        crop of what the stream of whole tiles gives. Which tiles, in what order, and how varied is as without.

        Reads of slides, masks and drawings what goes into the box. Read whole and cut then are: tiles that go through
        a cache, ``augment`` "cpu", whole pictures, and levels that OpenSlide draws between stored px. Batches hold
        bytes of the box alone, and microbatches of a ``DevicePrefetcher`` answer ``box`` for boxes inside it. Ranks
        that share tiles agree on replacements with ``TileIterator.follow``.

        Args:
            images: in px of the tile as the model is given it, turned and flipped: of a rank's part, and of what its
                first layer needs around it.
            targets: the box that is read of masks; None: the same.

        Raises:
            ValueError: tiles differ in size, or a box is not inside them.
        """
        if self.tiles.sides is not None:
            raise ValueError(
                "a part is the same box of every tile, and whole slides as tiles differ in size: give --tile in px"
            )
        stream = replace(self, boxes=(images, targets or images))
        stream._parts()
        return stream

    def prefetch(self, max_bytes: int = 1 << 30, threads: int = 4, allocate: Allocate = np.empty) -> Self:
        """Read ahead with ``threads`` threads, batches of up to ``max_bytes`` together, one at least.

        Args:
            max_bytes: all batches that exist, those the caller holds included.
            threads: that read and decode.
            allocate: makes the arrays; ``device.allocate_pinned`` for a CUDA device.
        """
        if max_bytes < 0 or threads < 1:
            raise ValueError(f"prefetch needs max_bytes >= 0 and threads >= 1; got {max_bytes} and {threads}")
        return replace(self, max_bytes=max_bytes, threads=threads, allocate=allocate)

    @cached_property
    def order(self) -> Order:
        """The order of rows that the settings ask for."""
        every = np.arange(len(self.tiles))
        if self.bag is not None:
            return Bags(every, self.tiles.slide, self.bag, self.seed)
        if self.weights is not None:
            mixed = self.open_slides or len(self.tiles.slides)
            return Weighted(every, self.tiles.slide, self.weights, self.seed, mixed)
        if self.strata is None:
            return self._order(every, 0, 1)
        classes, of_row = np.unique(self.strata, return_inverse=True)
        parts = np.split(np.argsort(of_row, kind="stable"), np.cumsum(np.bincount(of_row))[:-1])
        return Balance(tuple(self._order(rows, k, len(classes)) for k, rows in enumerate(parts)), self.seed)

    def _order(self, rows: Rows, stratum: int, strata: int) -> Order:
        if self.open_slides is None:
            return IndexOrder(rows)
        # Each stratum has a group of slides of its own open, so they share the number.
        return SlideShuffle(rows, self.tiles.slide[rows], self.seed, stratum, max(1, self.open_slides // strata))

    def __iter__(self) -> TileIterator:
        """Return an iterator over the batches of this rank, from the first on."""
        if self.pool is None:
            raise ValueError("the stream reads from no slides: add .read(pool) to it")
        target: Target = self.target or Labels(np.broadcast_to(np.int64(-1), len(self.tiles)))
        if self.bag is not None:
            target = Labels(self.tiles.slide.astype(np.int64))  # the fingerprint keeps the classes
        augment = CpuAugment(self.augmentation, self.seed) if self.augmentation.augment == "cpu" else None
        width, height = self.tiles.largest
        differ = self.tiles.sides is not None
        parts = self._parts()
        image_size: tuple[int, ...] = (3 * width * height,) if differ else (height, width, 3)
        target_size: tuple[int, ...] = (width * height,) if differ else (height, width)
        if parts is not None:
            image_size = (3 * parts.images.height * parts.images.width,)
            target_size = (parts.targets.height * parts.targets.width,)
        buffers = BufferPool(
            (len(self.image_rows), *image_size),
            (len(self.target_rows), *target.shape(target_size)),
            target.dtype,
            self.max_bytes,
            self.allocate,
            self.tiles.size if differ else None,
            parts,
        )
        report = self.on_fault or (lambda *fault: None)
        reader = SampleReader(self.tiles, self.pool, target, report, self.replaces, self.cut, augment, parts)
        return TileIterator(self.source, reader, buffers, self.threads, lambda: self.fingerprint)

    def _parts(self) -> TileParts | None:
        if self.boxes is None:
            return None
        width, height = self.tiles.largest
        return TileParts(*self.boxes, height, width, self.augmentation, self.seed)

    @cached_property
    def source(self) -> BatchSampler:
        """Content of each batch, and the part that this rank reads."""
        return BatchSampler(self.order, self.epochs, self.global_batch, (self.rows, self.image_rows, self.target_rows))

    @cached_property
    def fingerprint(self) -> dict[str, str | int]:
        """All that decides what sample i is, by name. Ranks, threads and memory are not among it."""
        settings: dict[str, str | int] = {
            "tiles": _digest(
                json.dumps([self.tiles.slides, asdict(self.tiles.settings)]).encode(),
                self.tiles.slide,
                self.tiles.l0_x,
                self.tiles.l0_y,
                *(() if self.tiles.sides is None else (self.tiles.sides,)),
            ),
            "seed": self.seed,
            "epochs": self.epochs or "endless",
            "open_slides": self.open_slides or "index order",
            "balance": "no" if self.strata is None else _digest(self.strata),
            **({} if self.bag is None else {"bag": self.bag}),
            "weights": "no" if self.weights is None else _digest(self.weights),
            "target": "none" if self.target is None else self.target.fingerprint(),
            "global_batch": self.global_batch,
        }
        if isinstance(self.target, Masks):
            settings["digest of the annotation files"] = self.target.annotations.digest
        varied = asdict(self.augmentation) if self.augmentation.augment != "none" else {"augment": "none"}
        cut = {} if self.cut is None else {"crop": f"varied {self.cut.varied}, flip {self.cut.flip}"}
        return settings | cut | {f"augment.{key}": str(value) for key, value in varied.items()}


def _digest(*parts: bytes | NDArray[Any]) -> str:
    digest = blake2b(digest_size=16)
    for data in parts:
        digest.update(data if isinstance(data, bytes) else np.ascontiguousarray(data).data)
    return digest.hexdigest()
