"""Held-out losses of a training, looked at a few times, as tables of several ways and seeds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.results import markdown_table, spread


class Run(NamedTuple):
    """Seconds of training before each look at the held-out loss, and these losses."""

    seconds: list[float]
    losses: list[float]

    def loss_at(self, seconds: float) -> float | None:
        """Return the last loss that was known after ``seconds`` of training."""
        known = [loss for at, loss in zip(self.seconds, self.losses, strict=True) if at <= seconds]
        return known[-1] if known else None


def loss_table(
    ways: Mapping[str, tuple[str, Sequence[Run]]], parts: Sequence[float], looks: int, work: int, unit: str
) -> str:
    """Return a row for each way: losses as median and range over its runs.

    Args:
        ways: name -> learning rate and runs.
        parts: of the time of the slowest way, and of all work, at which losses are read.
        looks: at the loss in a run, one before the first step not counted.
        work: done between two looks, in ``unit``.
    """
    took_s = {name: statistics.median(run.seconds[-1] for run in runs) for name, (_, runs) in ways.items()}
    slowest_s, at = max(took_s.values()), [round(part * looks) for part in parts]
    header = ["", "lr", "s", *(f"after {part * slowest_s:.1f} s" for part in parts)]
    header += [f"after {look * work} {unit}" for look in at]
    lines = []
    for name, (rate, runs) in ways.items():
        cells = [[run.loss_at(part * slowest_s) for run in runs] for part in parts]
        cells += [[run.losses[max(look - looks - 1, -len(run.losses))] for run in runs] for look in at]
        known = [[loss for loss in losses if loss is not None] for losses in cells]
        lines.append([name, rate, f"{took_s[name]:.1f}", *(spread(own, 3) if own else "no look yet" for own in known)])
    return markdown_table(header, lines)
