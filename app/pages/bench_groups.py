"""Results that may be compared: one model, one tile side, one number of ranks.

Takes rows in any order; gives groups in order of model, tile and ranks. A strategy appears once in a group: where it
was run for a scaling study too, the row of the plain comparison is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.pages.bench_file import Result
from app.pages.html import format_value


@dataclass(frozen=True)
class RowGroup:
    """Rows of one model, tile and number of ranks, in the order they were run."""

    model: str
    tile_px: int
    ranks: int
    results: tuple[Result, ...]

    @property
    def ranks_text(self) -> str:
        return f"{self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"

    @property
    def batch_text(self) -> str:
        """``8 tiles a step``; empty where rows differ: then each says its own."""
        batches = {one.global_batch for one in self.results}
        batch = next(iter(batches)) if len(batches) == 1 else None
        return "" if batch is None else f"{batch} {'tile' if batch == 1 else 'tiles'} a step"

    @property
    def ran(self) -> list[Result]:
        """Measured rows, fastest first, those whose loss is not the reference's left out: they did other work."""
        found = [one for one in self.results if one.ran and one.loss_matches is not False]
        return sorted(found, key=lambda one: -one.speed)

    @property
    def baseline(self) -> Result | None:
        """The data-parallel row that others are held against; None where it did not run, or no row names one."""
        named = next((one.baseline for one in self.results if one.baseline), None)
        names = [named] if named else ["single" if self.ranks == 1 else "ddp"]
        return next((one for one in self.ran if one.strategy in names), None)

    @property
    def unfit(self) -> list[Result]:
        """Rows of whole models that ran out of memory."""
        return [one for one in self.results if one.family == "whole" and one.status == "out-of-memory"]


def groups(results: Iterable[Result]) -> list[RowGroup]:
    """All groups: models in the order of the rows, then tiles and ranks from small to large."""
    found: dict[tuple[str, int, int], dict[str, Result]] = {}
    for one in sorted(results, key=lambda one: one.scaling is not None):
        found.setdefault((one.model, one.tile_px, one.ranks), {}).setdefault(one.strategy, one)
    models = list(dict.fromkeys(model for model, _, _ in found))
    keys = sorted(found, key=lambda key: (models.index(key[0]), *key[1:]))
    return [RowGroup(*key, tuple(found[key].values())) for key in keys]


def by_model(found: Sequence[RowGroup]) -> dict[str, list[RowGroup]]:
    """The groups of each model."""
    return {model: [one for one in found if one.model == model] for model in dict.fromkeys(one.model for one in found)}


def range_text(one: Result) -> str:
    """``1.20 to 1.25``; empty with fewer than two repeats."""
    if len(one.range) != 2 or len(one.repeats) == 1:
        return ""
    return f"{format_value(one.range[0], 3)} to {format_value(one.range[1], 3)}"


def apart(one: Result, other: Result) -> bool | None:
    """Their ranges do not overlap; None where one of them has none."""
    if len(one.range) != 2 or len(other.range) != 2:
        return None
    return one.range[0] > other.range[1] or other.range[0] > one.range[1]
