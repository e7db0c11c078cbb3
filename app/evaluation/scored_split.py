"""Which predicted slides are scored: those of one split of the run that trained the model, never two without asking.

Takes the rows of ``slides.csv`` and ``--split``; returns the rows to score and a line about all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.catalog.table import counted, listed

PREFERRED = ("test", "val", "external", "unknown")
"""Without ``--split`` the first of these that has a slide is scored: slides that were never looked at, those that chose
the checkpoint, those that the run did not have, those of checkpoints that record no split. Never training slides."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ScoredSplit:
    """The split that is scored.

    Attributes:
        name: train, val, test, external, unknown, or all.
        rows: predicted slides in it.
        counts: predicted slides of each split.
    """

    name: str
    rows: Rows
    counts: Mapping[str, int]

    def lines(self) -> list[str]:
        """Return what is scored and what is not."""
        others = ", ".join(f"{name} {count}" for name, count in self.counts.items() if self.name not in (name, "all"))
        left = f"; predicted and not scored: {others} (--split)" if others else ""
        lines = [f"scored split: {self.name}, {counted(len(self.rows), 'slide')}{left}"]
        if self.name == "unknown" or (self.name == "all" and "unknown" in self.counts):
            lines.append(
                "the checkpoint does not record the split of its run: training slides may be among those scored"
            )
        return lines

    def trained(self, scored: Sequence[str]) -> tuple[str, ...]:
        """Return the slides of ``scored`` that the run trained on, or on other slides of their patients."""
        train = {row["slide"] for row in self.rows if row["split"] == "train"}
        return tuple(slide for slide in scored if slide in train)


def choose_split(rows: Rows, asked: str | None) -> ScoredSplit:
    """Return the split to score.

    Args:
        rows: of all predicted slides.
        asked: ``--split``; None: the first of ``PREFERRED`` that has slides.

    Raises:
        ValueError: no predicted slide is in it.
    """
    counts = dict(sorted(Counter(row["split"] for row in rows).items()))
    name = asked or next((name for name in PREFERRED if name in counts), None)
    kept = [row for row in rows if name in (row["split"], "all")]
    if not kept:
        have = ", ".join(f"{name} {count}" for name, count in counts.items())
        what = f"--split {asked} has no predicted slide" if asked else "all predicted slides are training slides"
        raise ValueError(
            f"{what}: the predictions have {have}. Predict slides that the model was not trained on, or score these "
            f"with --split {next(iter(counts))}"
        )
    assert name is not None
    return ScoredSplit(name, kept, counts)


def training_note(trained: Sequence[str], scored: int) -> str:
    """Return a line that names training slides in a score."""
    return f"{len(trained)} of {scored} scored slides are training slides: {listed(trained)}"
