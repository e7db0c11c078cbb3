"""Settings of the optimizer, the loss and the checkpoints; a part of ``RunConfig``."""

from __future__ import annotations

import math
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
    """two-phase: copied to host memory during the next step, then written by a thread. blocking: written between two
    steps. The files are the same."""

    def validate(self) -> list[str]:
        faults = []
        if self.checkpoint_every < 0:
            faults.append(f"--checkpoint-every must be at least 1 step, or 0 to be tuned; got {self.checkpoint_every}")
        if not 0 < self.checkpoint_overhead <= 1:
            faults.append(f"--checkpoint-overhead is a share, above 0 to 1; got {self.checkpoint_overhead:g}")
        return faults


@dataclass(frozen=True)
class OptimizerSettings:
    """Optimisation."""

    optimizer: Rare[Literal["sgd", "adamw"]] = "adamw"
    """Update rule."""
    lr: float = 1e-3
    """Peak learning rate, reached after the warm-up, then lowered to 0 along a cosine."""
    momentum: Rare[float] = 0.9
    """Momentum of sgd."""
    weight_decay: Rare[float] = 1e-4
    """Decay of the weights, per unit of learning rate; biases and parameters of norms have none."""
    decay_all: Rare[bool] = False
    """Apply --weight-decay to biases and parameters of norms, too, as runs begun before this setting existed do."""
    warmup: Rare[int] = 0
    """Steps over which the learning rate rises linearly."""
    class_weights: Rare[Literal["none", "balanced"]] = "none"
    """balanced: rarer classes of the training tiles count more in the loss."""
    freeze: Rare[tuple[str, ...]] = ()
    """Modules that are not trained, by their paths, such as conv1 bn1 layer1; trunk: all layers but the last. Their
    batch norms keep the running statistics that --weights brought."""
    layer_decay: Rare[float] = 1.0
    """What the learning rate is multiplied with from layer to layer, counted from the last, such as 0.75 for weights
    that are trained further; 1: all alike."""
    ema: Rare[float] = 0.0
    """Decay of a running average of the weights, such as 0.999, which validation and app.predict use; it rises to that
    as (1 + n) / (10 + n) with the updates n. 0: none."""
    loss: Rare[Literal["auto", "cross_entropy", "dice_ce", "focal"]] = "auto"
    """What is minimised. dice_ce: cross entropy plus soft Dice of each tile and class, of segmentation; focal: cross
    entropy in which items count less that are already told well; auto: dice_ce of pixels, cross_entropy of tiles."""
    label_smoothing: Rare[float] = 0.0
    """Share of each target that is spread over all classes, 0 to below 1, in the cross entropy."""
    focal_gamma: Rare[float] = 2.0
    """Exponent of --loss focal, 1 or more: how much less an item counts that is told well."""

    def validate(self) -> list[str]:
        faults = []
        if not self.lr > 0:
            faults.append(f"--lr must be above 0; got {self.lr:g}")
        if not 0 <= self.momentum < 1:
            faults.append(f"--momentum must be within 0 and 1; got {self.momentum:g}")
        if not self.weight_decay >= 0:
            faults.append(f"--weight-decay must be at least 0; got {self.weight_decay:g}")
        if self.warmup < 0:
            faults.append(f"--warmup must be at least 0 steps; got {self.warmup}")
        if not 0 < self.layer_decay <= 1:
            faults.append(f"--layer-decay is a factor, above 0 to 1; got {self.layer_decay:g}")
        if not 0 <= self.ema < 1:
            faults.append(f"--ema is a decay, 0 (none) to below 1, such as 0.999; got {self.ema:g}")
        if not 0 <= self.label_smoothing < 1:
            faults.append(f"--label-smoothing is a share, 0 to below 1; got {self.label_smoothing:g}")
        if self.loss == "focal" and self.label_smoothing:
            faults.append(
                f"--label-smoothing {self.label_smoothing:g} is of the cross entropy, and --loss focal has another "
                "form: leave one of them out"
            )
        if not 1 <= self.focal_gamma < math.inf:
            faults.append(
                "--focal-gamma must be at least 1, as below it the gradient of a certain item is infinite; "
                f"got {self.focal_gamma:g}"
            )
        return faults
