"""The settings of what is minimised and how: update rule, learning rate and its course, weights of classes.

A part of ``RunConfig``; every field is a flag of ``app.train`` or one of its developer settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tyro.conf import Suppress


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimisation."""

    optimizer: Literal["sgd", "adamw"] = "adamw"
    """Update rule."""
    lr: float = 1e-3
    """Peak learning rate, reached after the warm-up, then lowered to 0 along a cosine."""
    momentum: Suppress[float] = 0.9
    """Momentum of sgd."""
    weight_decay: float = 1e-4
    """Decay of the parameters, per unit of learning rate."""
    warmup: int = 0
    """Steps over which the learning rate rises linearly."""
    class_weights: Literal["none", "balanced"] = "none"
    """balanced: rarer classes of the training tiles count more in the loss."""

    def validate(self) -> list[str]:
        faults = []
        if not self.lr > 0:
            faults.append(f"--lr must be above 0; got {self.lr:g}")
        if not 0 <= self.momentum < 1:
            faults.append(f"--developer momentum must be within 0 and 1; got {self.momentum:g}")
        if not self.weight_decay >= 0:
            faults.append(f"--weight-decay must be at least 0; got {self.weight_decay:g}")
        if self.warmup < 0:
            faults.append(f"--warmup must be at least 0 steps; got {self.warmup}")
        return faults
