"""Counts of a run so far, and whether it is still a run on the tiles that it was given.

Takes counts from the loop, step by step; returns what checkpoints keep and the summary tells.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.settings.cli import RunError
from app.training.examples import Example
from app.training.idle_time import IdleTime
from app.training.throughput import Throughput
from parallel.schedule.shares import Shares

JUDGED_FROM = 200
"""Tiles of a start after which a run most of whose tiles are replaced is given up: few beside a run, and enough that a
bad slide among the first that are read does not decide."""


@dataclass
class Outcome:
    """Counts of a run so far; all but speed and examples is kept in checkpoints.

    Attributes:
        images: tiles really trained on, counted on every rank, since the run began.
        replaced: those of them that stand in for a tile that cannot be read.
        validation: tiles of the last validation, those of them that cannot be read, and slides left without a score.
        best: step, metric and value of the best validation so far.
        stale: validations since that one.
        shares: microbatches of each group as they were last, where they have changed.
        examples: tiles of the last validation that the report shows.
    """

    throughput: Throughput
    idle: IdleTime
    step: int = 0
    images: int = 0
    replaced: int = 0
    loss: float | None = None
    status: str = "completed"
    metrics: dict[str, float | None] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    stale: int = 0
    shares: Shares = ()
    examples: tuple[Example, ...] = ()

    def stopped_early(self, patience: int, total_steps: int) -> dict[str, Any] | None:
        """Return why and when the run ended before its last step, as the summary has it; None where it did not.

        Args:
            patience: validations without a better score after which it ends; 0: it does not.
        """
        if not patience or self.stale < patience or self.step >= total_steps:
            return None
        best = {f"best_{key}": self.best[key] for key in ("step", "metric", "value")} if self.best else {}
        return {"step": self.step, "patience": patience, "validations": self.stale, **best}

    def check_replaced(self, failed_slides: Path, *, images: int = 0, replaced: int = 0, judged_from: int = 0) -> None:
        """Fail when more than half of the tiles are replaced.

        Args:
            failed_slides: the file that names them.
            images, replaced: leave out these, which were counted before.
            judged_from: tiles before that is judged.

        Raises:
            RunError: they are.
        """
        images, replaced = self.images - images, self.replaced - replaced
        if images < judged_from or 2 * replaced <= images:
            return
        raise RunError(
            f"{replaced} of {images} tiles that were trained on are replaced by others, as they cannot be read: a run "
            f"fails when more than half of the tiles are. {failed_slides} names the slides: mend them, or take them "
            "out, and start again"
        )
