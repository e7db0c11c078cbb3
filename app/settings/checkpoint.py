"""Settings of checkpoints: how often, how, and how much they may cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipelines.slides.rare import Rare


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints."""

    checkpoint_every: Rare[int] = 100
    """Steps between checkpoints; one is always written at each validation and at the end. 0: as often as
    --checkpoint-overhead allows, by what steps and checkpoints of this run are measured to take."""
    checkpoint_overhead: Rare[float] = 0.035
    """With --checkpoint-every 0: share of the time that checkpoints may cost, above 0 to 1."""
    checkpoint_write: Rare[Literal["two-phase", "blocking"]] = "two-phase"
    """two-phase: copied to the host's memory beside the next step's passes, then written by a thread; the
    first rank holds a copy of the parameters and the optimizer's state for it. blocking: written between two steps. The
    files are the same."""

    def validate(self) -> list[str]:
        faults = []
        if self.checkpoint_every < 0:
            faults.append(f"--checkpoint-every must be at least 1 step, or 0 to be tuned; got {self.checkpoint_every}")
        if not 0 < self.checkpoint_overhead <= 1:
            faults.append(f"--checkpoint-overhead is a share, above 0 to 1; got {self.checkpoint_overhead:g}")
        return faults
