"""Order in which tiles are seen, cut into batches: index order, shuffled, balanced or by weight.

Takes the slide (and class, or weight) of every tile and a seed; gives the rows of each epoch, and a rank's part of
every batch. An order has endless epochs of ``length`` rows each. Epoch e is a function of (settings, seed, e): every
rank and every resumed run finds the same one. Tiles are shuffled inside groups of a few slides, open at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.int64]
"""int64 (n,), rows of a ``TileTable``."""

GOLDEN = (5**0.5 - 1) / 2

SHUFFLE, INTERLEAVE, WEIGH, BAGS = 1, 2, 6, 7
"""Purposes that random numbers are drawn for; part of each seed, so that no two purposes share numbers.
``augment.py`` has 3 to 5."""


@dataclass(frozen=True, eq=False)
class IndexOrder:
    """The rows as they are given, int64 (n,), every epoch alike."""

    rows: Rows

    @property
    def length(self) -> int:
        return len(self.rows)

    def epoch(self, number: int) -> Rows:
        """Return the rows of one epoch: int64 (length,)."""
        return self.rows


@dataclass(frozen=True, eq=False)
class SlideOrder(IndexOrder):
    """Base of orders that go by slide.

    Attributes:
        slide: int (n,), slide of each of ``rows``.
    """

    slide: NDArray[np.integer]

    @cached_property
    def _tiles_of_slides(self) -> list[Rows]:
        return by_slide(np.arange(len(self.rows)), self.slide)


@dataclass(frozen=True, eq=False)
class SlideShuffle(SlideOrder):
    """Every row once per epoch; tiles of up to ``open_slides`` slides are mixed at a time.

    Attributes:
        stratum: tells apart the shuffles of several strata in one run.
    """

    seed: int
    stratum: int
    open_slides: int

    def epoch(self, number: int) -> Rows:
        rng = np.random.default_rng([self.seed, SHUFFLE, self.stratum, number])
        return self.rows[_mixed(rng, self._tiles_of_slides, self.open_slides)]


def by_slide(tiles: Rows, slide: NDArray[np.integer]) -> list[Rows]:
    """Return ``tiles`` of each slide, in their order; ``slide`` is of each of them."""
    order = np.argsort(slide, kind="stable")
    return np.split(tiles[order], np.flatnonzero(np.diff(slide[order])) + 1)


def _mixed(rng: np.random.Generator, slides: Sequence[Rows], open_slides: int) -> Rows:
    """The tiles of all slides, those of ``open_slides`` at a time mixed."""
    groups = []
    # Groups of equal size: a last group of one slide would end every epoch on batches of that slide alone.
    for group in np.array_split(rng.permutation(len(slides)), -(-len(slides) // open_slides)):
        tiles = np.concatenate([slides[k] for k in group])
        rng.shuffle(tiles)
        groups.append(tiles)
    return np.concatenate(groups)


@dataclass(frozen=True, eq=False)
class Weighted(SlideOrder):
    """Order with a draw for each row, in proportion to its weight; slides are mixed as in ``SlideShuffle``.

    Rows lie on a line, each as long as its weight, those of a slide next to each other; an epoch draws at points of
    equal distance (systematic sampling, Madow 1944): the count of a row, and of a slide, is off its weight by less than
    one. From epoch to epoch the points move by the golden ratio of their distance, so that no row is left out for long.

    Attributes:
        weight: float64 (n,), at least 0, sum above 0.
    """

    weight: NDArray[np.float64]
    seed: int
    open_slides: int

    def epoch(self, number: int) -> Rows:
        line, ends, start = self._line
        first = (start + number * GOLDEN) % 1.0
        # points first, first + 1, ...: how many lie before the end of each row
        before = np.ceil(ends - first).astype(np.int64).clip(0)
        drawn = np.repeat(line, np.diff(before, prepend=0))
        rng = np.random.default_rng([self.seed, WEIGH, number + 1])
        return self.rows[_mixed(rng, by_slide(drawn, self.slide[drawn]), self.open_slides)]

    @cached_property
    def _line(self) -> tuple[Rows, NDArray[np.float64], float]:
        """Positions in ``rows`` along the line, the end of each in points, and where the first point lies."""
        rng = np.random.default_rng([self.seed, WEIGH, 0])
        line = rng.permutation(self.length)
        line = line[np.argsort(self.slide[line], kind="stable")]
        ends = np.cumsum(self.weight[line])
        ends *= self.length / ends[-1]
        ends[-1] = self.length
        last = int(np.flatnonzero(self.weight[line])[-1])
        ends[last:] = self.length  # a rounded sum leaves no point to rows of weight 0
        return line, ends, float(rng.random())


@dataclass(frozen=True, eq=False)
class Bags(SlideOrder):
    """Bags of tiles: every slide once per epoch, with ``size`` of its tiles one after the other.

    Tiles of a slide are drawn without replacement, from a new permutation whenever all were seen; a slide with fewer
    tiles than a bag has some of them twice.

    Attributes:
        size: tiles of a bag.
    """

    size: int
    seed: int

    @property
    def length(self) -> int:
        return len(self._tiles_of_slides) * self.size

    def epoch(self, number: int) -> Rows:
        rng = np.random.default_rng([self.seed, BAGS, number])
        bags = [self._bag(k, number) for k in rng.permutation(len(self._tiles_of_slides))]
        return self.rows[np.concatenate(bags)]

    def _bag(self, k: int, number: int) -> Rows:
        """Return bag ``number`` of slide ``k``: a stretch of the endless sequence of its permutations."""
        tiles = self._tiles_of_slides[k]
        turns = np.arange(number * self.size, (number + 1) * self.size)
        drawn = {
            turn: np.random.default_rng([self.seed, BAGS, k, int(turn), 1]).permutation(tiles)
            for turn in np.unique(turns // len(tiles))
        }
        return np.array([drawn[turn // len(tiles)][turn % len(tiles)] for turn in turns], np.int64)


@dataclass(frozen=True, eq=False)
class Balance:
    """Every stratum equally often per epoch, whatever its size.

    An epoch has one draw for each row, rounded up to a multiple of the strata. Draws come in rounds; each round has
    one row of every stratum, in random order, so that no rank's share of a batch sees one stratum only. A stratum goes
    through its own order again and again, without regard to the ends of the epochs: within a stratum all rows are seen
    equally often.

    Attributes:
        strata: one order per stratum, none of them empty.
    """

    strata: tuple[Order, ...]
    seed: int

    @property
    def _rounds(self) -> int:
        return -(-sum(stratum.length for stratum in self.strata) // len(self.strata))

    @property
    def length(self) -> int:
        return self._rounds * len(self.strata)

    def epoch(self, number: int) -> Rows:
        rounds, count = self._rounds, len(self.strata)
        drawn = np.empty((rounds, count), np.int64)
        for k, stratum in enumerate(self.strata):
            drawn[:, k] = _stretch(stratum, number * rounds, rounds)
        rng = np.random.default_rng([self.seed, INTERLEAVE, number])
        rng.permuted(drawn, axis=1, out=drawn)
        return drawn.reshape(-1)


Order = IndexOrder | Balance


def _stretch(order: Order, first: int, count: int) -> Rows:
    """``count`` rows of the endless sequence of an order's epochs, from position ``first`` on."""
    number, skip = divmod(first, order.length)
    parts = [order.epoch(number)[skip : skip + count]]
    missing = count - len(parts[0])
    while missing:
        number += 1
        parts.append(order.epoch(number)[:missing])
        missing -= len(parts[-1])
    return np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class BatchRequest:
    """Part of a global batch that a rank reads, of n tiles at most.

    Attributes:
        samples, rows: int64 (n,), global sample numbers, and the rows of the table that they are drawn from.
        first_sample: the first sample number of the global batch.
        image, target: bool (n,), whose pixels and whose targets are read.
    """

    samples: Rows
    rows: Rows
    first_sample: int
    image: NDArray[np.bool_]
    target: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class BatchSampler:
    """The sequence of epochs cut into global batches, and of each what one rank reads: a function of its number alone.

    Attributes:
        epochs: how many there are; None for endless ones.
        global_batch: tiles of a batch, over all ranks.
        batch_rows: places in the global batch that are this rank's, and those whose pixels and whose targets it reads.
    """

    order: Order
    epochs: int | None
    global_batch: int
    batch_rows: tuple[Sequence[int], Sequence[int], Sequence[int]]

    def requests(self, first: int) -> Iterator[BatchRequest]:
        """Yield what is read of batch number ``first`` and all that follow."""
        every, image_rows, target_rows = (np.asarray(rows, np.int64) for rows in self.batch_rows)
        end = None if self.epochs is None else self.epochs * self.order.length
        epoch = lru_cache(1)(self.order.epoch)  # samples ascend from batch to batch, and so do epochs
        for first_sample in itertools.count(first * self.global_batch, self.global_batch):
            if end is not None and first_sample >= end:
                return
            rows = every if end is None else every[first_sample + every < end]
            samples = first_sample + rows
            drawn = self._drawn(samples, epoch)
            yield BatchRequest(samples, drawn, first_sample, np.isin(rows, image_rows), np.isin(rows, target_rows))

    def rows_of(self, samples: Rows) -> Rows:
        """Return the rows of the table that ``samples`` are drawn from, on whatever rank."""
        return self._drawn(samples, self.order.epoch)

    def _drawn(self, samples: Rows, rows_of_epoch: Callable[[int], Rows]) -> Rows:
        epoch, position = np.divmod(samples, self.order.length)
        rows = np.empty(len(samples), np.int64)
        for number in np.unique(epoch).tolist():
            rows[epoch == number] = rows_of_epoch(number)[position[epoch == number]]
        return rows


IN_TURN = 0.5
"""Part of the draws that go to the classes round robin: tiles of background alone are seen, too."""

ROUNDS = 2000
"""Steps towards equal pixels: each is an update of a few numbers, and far fewer are needed."""


def slide_weights(slide: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return weights (n,) by which each slide is drawn equally often, and so are the tiles of one slide."""
    tiles: NDArray[np.float64] = np.bincount(slide).astype(np.float64)
    weights: NDArray[np.float64] = 1 / tiles[slide] / np.count_nonzero(tiles)
    return weights


def pixel_weights(areas: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return weights (n,) that show pixels of all classes equally often, as far as the tiles allow.

    A draw is for a class, and finds a tile in proportion to its px of that class. Half of the draws go to the classes
    round robin. The other half maximises the sum of the logarithms of the shown px of each class, by the multiplicative
    updates of expectation maximisation. Without ignored pixels, classes are then equal where the free half allows it.

    Args:
        areas: (n, C), px or points of each class on each tile; a class without any takes no part, and a tile without
            any is not drawn.

    Raises:
        ValueError: there is nothing on any tile.
    """
    totals = areas.sum(0)
    drawn = areas[:, totals > 0].astype(np.float64)
    if not drawn.size:
        raise ValueError("--sample pixels needs something drawn on the training tiles; there is nothing on any of them")
    of_class = drawn / drawn.sum(0)  # (n, C'), chance of each tile when a draw is for a class
    # einsum, not @: BLAS rounds as the type of the CPU has it, and a run resumed on another one would draw other tiles.
    shown = np.einsum("ni,nj->ij", of_class, drawn)  # (C', C'), px of each class that a draw for a class shows
    classes = len(shown)
    even = np.full(classes, 1 / classes)
    free = even
    for _ in range(ROUNDS):
        share = np.einsum("i,ij->j", IN_TURN * even + (1 - IN_TURN) * free, shown)
        updated = free * np.einsum("ij,j->i", shown, even / share)
        updated /= updated.sum()
        if np.abs(updated - free).max() < 1e-9:
            break
        free = updated
    weights: NDArray[np.float64] = np.einsum("ni,i->n", of_class, IN_TURN * even + (1 - IN_TURN) * free)
    return weights
