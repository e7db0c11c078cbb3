"""Region of a model that can be computed in boxes, on paper: its steps for tiles of one size. No torch here."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from parallel.space.phases import maps_to_recompute
from parallel.space.rule import Step


@dataclass(frozen=True)
class PaperRegion:
    """Region of a model that can be computed in boxes, for tiles of one size.

    Attributes:
        steps: in the order of the model.
        sides: rows and columns of every map.
        side: rows and columns of the tile.
        inputs: bytes of the maps that enter, by name.
        leaving: names that are used after the region.
        whole: names of values that cannot be stored.
        images: names of what enters without a gradient.
        tiles: of the microbatch.
        ends_at: (layer, reason) that ended it; None where everything that has rows is in it.
    """

    steps: tuple[Step, ...]
    sides: Mapping[str, tuple[int, int]]
    side: tuple[int, int]
    inputs: Mapping[str, int]
    leaving: tuple[str, ...]
    whole: frozenset[str] = frozenset()
    images: frozenset[str] = frozenset()
    tiles: int = 1
    ends_at: tuple[str, str] | None = None
    _recomputed: dict[int, frozenset[str]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of_tiles(self, tiles: int) -> PaperRegion:
        """Return the region of one tile for microbatches of ``tiles``."""
        assert self.tiles == 1, self.tiles
        if tiles == 1:
            return self
        steps = (
            replace(
                step,
                flops=step.flops * tiles,
                value_bytes=step.value_bytes * tiles,
                kept_bytes=step.kept_bytes * tiles,
                work_bytes=step.work_bytes * tiles,
            )
            for step in self.steps
        )
        inputs = {name: size * tiles for name, size in self.inputs.items()}
        return replace(self, steps=tuple(steps), inputs=inputs, tiles=tiles)

    def maps_to_recompute(self, limit: int) -> frozenset[str]:
        """Return names of the maps to recompute so that the others take no more than ``limit`` bytes on the host."""
        if limit not in self._recomputed:
            found = maps_to_recompute(self.steps, self.leaving, self.sizes, self.images, limit)
            self._recomputed[limit] = found
        return self._recomputed[limit]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every map."""
        return {**self.inputs, **{step.name: step.value_bytes for step in self.steps}}

    @functools.cached_property
    def square(self) -> bool:
        """Rows and columns are alike, in the tile and in every step."""
        sides = (self.side, *self.sides.values())
        return all(rows == columns for rows, columns in (*sides, *(step.rules for step in self.steps)))
