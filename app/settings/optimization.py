"""Settings of the model, the optimizer, the loss, validation and checkpoints; parts of ``RunConfig``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from app.settings.fields import at_least, broken
from pipelines import Rare

Norm = Literal["batch", "group", "instance", "frozen", "layer"]
Head = Literal["average", "gem", "attention"]


@dataclass(frozen=True)
class ModelSettings:
    """The model."""

    model: str = "resnet50"
    """resnet18-152, resnet110_v2, unet, unet:NAME, amoebanet(L,D), torchvision:, timm: or smp:NAME, or pkg.mod:make."""
    norm: Norm = "batch"
    """Normalisation. frozen: batch norm with the running statistics of --weights."""
    head: Rare[Head] = "average"
    """Pooling of a classifier's last map: average, gated attention, or generalised mean with trained exponent."""
    weights: str | None = None
    """Start from the parameters in this file, or pretrained. A model with a tag (timm:NAME.TAG) implies pretrained."""


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
    """Apply --weight-decay to biases and parameters of norms, too."""
    warmup: Rare[int] = 0
    """Steps over which the learning rate rises linearly."""
    class_weights: Rare[Literal["none", "balanced"]] = "none"
    """balanced: rarer classes of the training tiles count more in the loss."""
    freeze: Rare[tuple[str, ...]] = ()
    """Modules that are not trained, by path, such as conv1 layer1; trunk: all layers but the last and the --head."""
    layer_decay: Rare[float] = 1.0
    """Factor of the learning rate from layer to layer, counted from the last, such as 0.75; 1: all alike."""
    ema: Rare[float] = 0.0
    """Decay of a running average of the weights, such as 0.999, for validation and app.predict. 0: none."""
    loss: Rare[Literal["auto", "cross_entropy", "dice_ce", "focal"]] = "auto"
    """Loss. dice_ce: cross entropy plus soft Dice. auto: dice_ce of pixels, cross_entropy of tiles."""
    label_smoothing: Rare[float] = 0.0
    """Share of each target that is spread over all classes, 0 to below 1, in the cross entropy."""
    focal_gamma: Rare[float] = 2.0
    """Exponent of --loss focal, 1 or more: how much less a well classified item counts."""

    def validate(self) -> list[str]:
        smoothing = self.label_smoothing
        rules = {
            f"--lr must be above 0; got {self.lr:g}": not self.lr > 0,
            f"--momentum must be within 0 and 1; got {self.momentum:g}": not 0 <= self.momentum < 1,
            f"--weight-decay must be at least 0; got {self.weight_decay:g}": not self.weight_decay >= 0,
            **at_least(self, warmup=0),
            f"--layer-decay is a factor, above 0 to 1; got {self.layer_decay:g}": not 0 < self.layer_decay <= 1,
            f"--ema is a decay, 0 (none) to below 1, such as 0.999; got {self.ema:g}": not 0 <= self.ema < 1,
            f"--label-smoothing is a share, 0 to below 1; got {smoothing:g}": not 0 <= smoothing < 1,
            f"--label-smoothing {smoothing:g} is of the cross entropy, and --loss focal has another form: leave one of "
            "them out": self.loss == "focal" and smoothing,
            "--focal-gamma must be at least 1, as below it the gradient of a certain item is infinite; got "
            f"{self.focal_gamma:g}": not 1 <= self.focal_gamma < math.inf,
        }
        return broken(rules)


@dataclass(frozen=True)
class ScoreSettings:
    """Validation."""

    validate_every: Rare[int] = 0
    """Steps between validations; 0: after each epoch. The end of the run is always validated."""
    validation_tiles: Rare[int] = 0
    """Tiles scored per validation slide, evenly spread; 0: all."""
    slide_score: Rare[Literal["mean", "max", "top-k"]] = "mean"
    """How the scores of a slide's tiles make the score of the slide."""
    positive_class: Rare[str | None] = None
    """Positive class of two, for heat maps and patients. Default: the one not called normal, benign, negative or 0."""
    patience: int = 0
    """Validations without a better score, after which a run ends; 0: it takes all its steps."""
    top_k: Rare[int] = 5
    """Tiles that count under --slide-score top-k."""

    def validate(self) -> list[str]:
        return broken(at_least(self, validate_every=0, validation_tiles=0, top_k=1, patience=0))


@dataclass(frozen=True)
class CheckpointSettings:
    """Checkpoints."""

    checkpoint_every: Rare[int] = 100
    """Steps between checkpoints, besides those of validations and the end. 0: tuned by --checkpoint-overhead."""
    checkpoint_overhead: Rare[float] = 0.035
    """With --checkpoint-every 0: share of the time that checkpoints may cost, above 0 to 1."""
    checkpoint_write: Rare[Literal["two-phase", "blocking"]] = "two-phase"
    """two-phase: copied during the next step, then written by a thread. blocking: written between steps."""

    def validate(self) -> list[str]:
        every, overhead = self.checkpoint_every, self.checkpoint_overhead
        rules = {
            f"--checkpoint-every must be at least 1 step, or 0 to be tuned; got {every}": every < 0,
            f"--checkpoint-overhead is a share, above 0 to 1; got {overhead:g}": not 0 < overhead <= 1,
        }
        return broken(rules)
